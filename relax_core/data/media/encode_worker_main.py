"""The worker process that encodes media: ``python -m relax_core.data.media.encode_worker_main``.

An `EncodePool` starts this process as a child. The process imports neither torch nor transformers. It imports the
tokenizer only for a video.
"""

from __future__ import annotations

import resource
from functools import cache
from pathlib import Path

import msgspec

from relax_core.contracts.child_process import OwnerPipe, Ready, cpu_limit
from relax_core.contracts.media import MediaError, MediaSource
from relax_core.contracts.media_file import write_item
from relax_core.data.media.encode_pool import EncodeAnswer, EncodeRequest, EncodeSettings
from relax_core.data.media.item_encoder import Tokenize, encode_item


def main() -> None:
    """Reads the settings and encodes until stdin ends."""
    pipe = OwnerPipe()
    settings = msgspec.msgpack.decode(pipe.read(), type=EncodeSettings)
    error = _missing_library(audio=settings.audio is not None)
    pipe.write(Ready(error))
    if error:
        return
    resource.setrlimit(resource.RLIMIT_AS, (settings.limits.worker_bytes,) * 2)
    tokenize = _tokenize(Path(settings.model_folder))
    while True:
        request = msgspec.msgpack.decode(pipe.read(), type=EncodeRequest)
        data = pipe.read_bytes(request.data_bytes) if request.path is None else None
        source = MediaSource(kind=request.kind, path=request.path, data=data)
        with cpu_limit(settings.limits.worker_timeout_s):
            answer = _encode(source, settings, tokenize)
        pipe.write(answer)


def _encode(source: MediaSource, settings: EncodeSettings, tokenize: Tokenize) -> EncodeAnswer:
    try:
        item, tensors = encode_item(
            source,
            settings.tower,
            settings.limits,
            root=Path(settings.root),
            tokenize=tokenize,
            audio=settings.audio,
            audio_in_video=settings.audio_in_video,
        )
        return EncodeAnswer(item=write_item(Path(settings.folder), item, tensors))
    except MediaError as error:
        return EncodeAnswer(word=error.word, text=str(error))
    except MemoryError:
        limit = settings.limits.worker_bytes
        return EncodeAnswer(
            word="worker_killed", text=f"{source.description}: a worker's {limit:,} bytes are not enough."
        )


def _tokenize(model_folder: Path) -> Tokenize:
    @cache  # the first call reads the tokenizer, which an image does not need
    def encode_plain() -> Tokenize:
        from relax_core.data.tokenizer import PromptTokenizer

        return PromptTokenizer(model_folder).encode_plain

    return lambda text: encode_plain()(text)


def _missing_library(*, audio: bool) -> str:
    """Returns an error with the install command if a decoder is missing, else an empty text."""
    try:
        import av  # noqa: F401
        from PIL import Image  # noqa: F401

        if audio:
            import soundfile  # noqa: F401
            import soxr  # noqa: F401
    except ImportError as error:
        message = "Images and videos need Pillow and PyAV, and sounds need soundfile and soxr"
        return f"{error}. {message}: pip install 'relax-core[omni]'"
    return ""


if __name__ == "__main__":
    main()
