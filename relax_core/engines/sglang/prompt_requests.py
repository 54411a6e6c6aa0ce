"""Builds SGLang's /generate body: one request for each sample with its own seed, and images for servers of others."""

from __future__ import annotations

import base64
import hashlib
import itertools
import secrets
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.contracts.media import Media, short_form
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.protocol.request_body import response_limit
from relax_core.engines.sglang.media.placed_items import placed_name

BAN = -1e30  # a logit whose probability is exactly 0 at every temperature, in float32 and bfloat16
_numbers = itertools.count()
# The ids that are sent for a prompt, and an entry of image_data for each of its images and videos.
MediaEntries = tuple[list[int], list[str]]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Holds one sample's request: the prompt's index, the sample from 0 to n - 1, and a rid that is used once."""

    prompt: int
    sample: int
    rid: str


def named_media(prompt: PromptRequest) -> MediaEntries:
    """Returns a prompt's ids and the names of its items, for a server of the run, which maps their files."""
    return prompt.input_ids, [placed_name(one) for one in prompt.media]


def image_data(entries: Sequence[list[str]]) -> dict[str, Any]:
    """Returns the field image_data of a body, which a body without images and videos does not have.

    ``entries`` has a list for each sample, an empty one for text alone.
    """
    return {"image_data": list(entries)} if any(entries) else {}


def sample_requests(prompts: Sequence[PromptRequest], *, n: int) -> list[SampleRequest]:
    """Returns one request for each sample that the prompts ask for."""
    return [
        SampleRequest(index, sample, f"{prompt.rid}/{sample}/{next(_numbers)}")
        for index, prompt in enumerate(prompts)
        for sample in (range(n) if prompt.samples is None else prompt.samples)
    ]


def sample_seed(prompt_seed: int, sample: int) -> int:
    """Returns the seed of one sample of a prompt, an integer of 63 bits.

    SGLang adds the token's position to it, so that a response that goes on after its own prefix goes on with its own
    random numbers.
    """
    digest = hashlib.blake2b(f"{prompt_seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sglang_body(
    prompts: Sequence[PromptRequest],
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    *,
    version: int,
    seeds: bool,
    media: Callable[[PromptRequest], MediaEntries] | None = None,
    tells_tokens: bool = False,
) -> dict[str, Any]:
    """Returns the JSON body of one /generate.

    ``version`` is the weight version in force; SGLang reuses a cached prefix only for requests with the same version.
    If sampling leaves tokens out, the body asks for the kept sets, with which SGLang returns the log-probs over these
    sets; its usual log-probs are over the whole vocabulary. ``media`` returns the ids that are sent for a prompt, and
    its entries of image_data; the default is `named_media`. ``tells_tokens``: an event comes for each new token.
    """
    sent = [(media or named_media)(prompt) for prompt in prompts]
    bans = {str(token): BAN for token in params.banned_token_ids}
    return {
        "rid": [one.rid for one in samples],
        "input_ids": [sent[one.prompt][0] for one in samples],
        "sampling_params": [
            _sampling(prompts[one.prompt], one.sample, params, bans, seeds=seeds)
            | ({"stream_interval": 1} if tells_tokens else {})
            for one in samples
        ],
        "return_logprob": True,
        "stream": True,
        "extra_key": f"weights-{version}",
        "return_sampling_mask": params.truncates,
        "return_routed_experts": params.return_routed_experts,
        **image_data([sent[one.prompt][1] for one in samples]),
    }


def _sampling(
    prompt: PromptRequest, sample: int, params: SamplingParams, bans: dict[str, float], *, seeds: bool
) -> dict[str, Any]:
    new_tokens = response_limit(prompt, params) - prompt.generated
    fields: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": params.stop_token_ids,
        "stream_interval": new_tokens,  # SGLang then sends events only for the first token and the end
    }
    if params.stop:
        fields["stop"] = params.stop
    if bans:
        fields["logit_bias"] = bans
    if seeds:
        fields["sampling_seed"] = sample_seed(prompt.sampling_seed, sample)
    return fields


_COMPRESSION = 1  # zlib's fastest level: the bytes go to a server nearby


class AttachedImages:
    """Makes the requests for a server that decodes images itself.

    SGLang keeps the features of an image by its bytes, beyond every weight update. The PNGs of this object therefore
    contain a text of their own, with the weight version, which makes them other bytes under other weights.
    """

    def __init__(self, media_folder: Path | None) -> None:
        self._reader = None if media_folder is None else FolderReader(media_folder)
        self._mark = secrets.token_hex(8)

    def entries(self, input_ids: list[int], media: Sequence[Media], *, version: int) -> MediaEntries:
        """Returns the ids with a placeholder for each image, and the images as base64 of PNGs.

        Raises ValueError for a video, because SGLang would sample, resize and time its frames again.
        """
        if not media:
            return input_ids, []
        if any(one.item.kind == "video" for one in media):
            raise ValueError(
                "a server that engine.urls names takes images only, and the prompt has a video. Let the run start its "
                "servers (drop engine.urls), or leave videos out (modality=text, or other data)."
            )
        if self._reader is None:
            raise ValueError("the prompt has an image, and the run has no media folder (modality=text?).")
        comment = f"{self._mark} {version}"
        frames = [self._reader.tensors(one.item)["frames"][0] for one in media]
        pictures = [base64.b64encode(png(frame, comment=comment)).decode() for frame in frames]
        return short_form(input_ids, media), pictures


def png(frame: np.ndarray, *, comment: str) -> bytes:
    """Returns a frame, uint8 ``[height, width, 3]``, as a PNG with a text chunk (W3C PNG, third edition)."""
    height, width, _ = frame.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each row begins with 0: no filter
    rows[:, 1:] = frame.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a colour, RGB, not interlaced
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in (
            (b"IHDR", header),
            (b"tEXt", b"Comment\0" + comment.encode("latin-1")),
            (b"IDAT", zlib.compress(rows.tobytes(), _COMPRESSION)),
            (b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
