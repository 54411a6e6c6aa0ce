"""Sends a judge's prompts to engines of the run, or to a server with OpenAI's chat protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from relax_core.contracts.engine import EngineError, Generated, PromptRequest, SamplingParams
from relax_core.contracts.judge import JudgeConfig
from relax_core.data.tokenizer import LARGE_TEXT, PromptTokenizer, TextTooLong
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.protocol.generate_messages import Natural, decoded, printable_text
from relax_core.rollout.episodes.shared_requests import Asked, SharedRequests
from relax_core.rollout.judges.judge_prompts import without_markup
from relax_core.rollout.prompt_tokens import off_loop

if TYPE_CHECKING:
    import aiohttp

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # pauses before a request is sent again
CONNECT_S = 5.0
CONNECTIONS = 64  # concurrent connections to one server
MAX_BYTES = 4 << 20  # limit of a server's reply
_LATER = (408, 425, 429)  # statuses after which a request is sent again


class JudgeRefused(Exception):
    """Reports that the judge rejects a prompt, and that another try would not help; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class JudgeText:
    """Holds one answer of a judge.

    ``is_cut`` is True if the answer reached the token limit. ``tokens`` is the number of tokens of prompt and answer.
    """

    text: str
    is_cut: bool
    tokens: int


class JudgeServer(Protocol):
    """Answers the prompts of one judge."""

    def shown(self, value: str) -> str:
        """Returns a variable's value in the form for the prompt."""
        ...

    async def answer(self, text: str, *, seed: int, temperature: float) -> JudgeText:
        """Returns the answer to one prompt; waits while the server is down. The caller sets the deadline.

        Raises `JudgeRefused`.
        """
        ...

    async def close(self) -> None:
        """Ends all connections."""
        ...


class JudgeEngines:
    """Sends the prompts of one judge to engines of the run, with the judge's tokenizer and chat template.

    A prompt is one user message, and no text in this message becomes a special token. ``context_tokens`` is the largest
    number of tokens of a prompt with its answer. Prompts from one iteration of the event loop, such as the prompts of a
    group, share a request, and the engine computes them together.
    """

    def __init__(
        self,
        judge: str,
        settings: JudgeConfig,
        pool: EnginePool,
        *,
        model_folder: Path,
        context_tokens: int,
        date: str | None = None,
    ) -> None:
        self._judge, self._settings, self._pool = judge, settings, pool
        self._tokenizer = PromptTokenizer(model_folder, date=date)
        self._context_tokens = context_tokens
        self._numbers = count()
        self._ready: dict[float, list[Asked]] = {}  # by temperature
        self._tasks: set[asyncio.Task[None]] = set()

    def shown(self, value: str) -> str:
        """Returns the value unchanged."""
        return value

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a prompt. Raises `TextTooLong` if the prompt exceeds the judge's context."""
        most = self._context_tokens
        return self._tokenizer.encode([{"role": "user", "content": text}], most_tokens=most)

    async def answer(self, text: str, *, seed: int, temperature: float) -> JudgeText:
        """Returns the answer of an engine; see `JudgeServer`."""
        most = self._settings.max_new_tokens
        try:
            ids = await off_loop(len(text) > LARGE_TEXT, lambda: self.tokens(text))
        except TextTooLong as error:
            raise JudgeRefused(f"the prompt is too long for the judge's context: {error}") from error
        if len(ids) + most > self._context_tokens:
            raise JudgeRefused(
                f"the prompt has {len(ids)} tokens, and with max_new_tokens={most} the judge's context holds "
                f"{self._context_tokens}"
            )
        number = next(self._numbers)
        request = PromptRequest(rid=f"judge-{self._judge}-{number}", input_ids=ids, sampling_seed=seed)
        response: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        ready = self._ready.setdefault(temperature, [])
        ready.append((request, number, response, None))
        if len(ready) == 1:
            self._start(self._send_ready(temperature))
        try:
            return self._text(await response, prompt_tokens=len(ids))
        except asyncio.CancelledError:
            self._start(self._pool.cancel([request.rid]))
            raise

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_ready(self, temperature: float) -> None:
        await asyncio.sleep(0)  # all callers of this iteration first add their prompts
        await self._send(self._ready.pop(temperature), temperature)

    async def _send(self, asked: Sequence[Asked], temperature: float) -> None:
        """Sends one request. If an engine refuses it, sends each prompt separately."""
        params = SamplingParams(
            max_new_tokens=self._settings.max_new_tokens,
            temperature=temperature,
            stop_token_ids=self._tokenizer.stop_token_ids,
        )
        try:
            await SharedRequests(self._pool, params).answer(asked)
        except Exception as error:  # the callers raise the error
            left = [question for question in asked if not question[2].done()]
            if isinstance(error, EngineError) and len(asked) > 1:
                for question in left:
                    self._start(self._send([question], temperature))
                return
            for _, _, response, _ in left:
                response.set_exception(JudgeRefused(str(error)) if isinstance(error, EngineError) else error)

    def _text(self, generated: Generated, *, prompt_tokens: int) -> JudgeText:
        ids = generated.output_ids.tolist()
        stopped = generated.finish_reason == "stop"
        said = ids[:-1] if stopped and ids and ids[-1] in self._tokenizer.stop_token_ids else ids
        return JudgeText(text=self._tokenizer.decode(said), is_cut=not stopped, tokens=prompt_tokens + len(ids))

    async def close(self) -> None:
        """Cancels the requests in flight; the connections to the engines stay open for the run."""
        for task in self._tasks:
            task.cancel()


class JudgeUrl:
    """Sends prompts to a server with OpenAI's chat protocol at ``settings.url``, which ends in /v1.

    A request is sent again if the server does not answer, or answers with 5xx, 408, 425 or 429. Control tokens in
    values are broken by a zero-width space, because the server's tokenizer is unknown.
    """

    def __init__(self, settings: JudgeConfig) -> None:
        assert settings.url is not None
        self._settings = settings
        self._url = settings.url.rstrip("/") + "/chat/completions"
        self._token = Path(settings.token_file).read_text().strip() if settings.token_file is not None else ""
        self._session: aiohttp.ClientSession | None = None
        self.last_error = ""

    def shown(self, value: str) -> str:
        """Returns the value with broken control tokens."""
        return without_markup(value)

    async def answer(self, text: str, *, seed: int, temperature: float) -> JudgeText:
        """Returns the server's answer; see `JudgeServer`."""
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._settings.max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        pause_s = FIRST_PAUSE_S
        while True:
            reply = await self._try(body)
            if reply is not None:
                return reply
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a time-out of the HTTP client may swallow a cancellation
                raise asyncio.CancelledError
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _try(self, body: dict[str, Any]) -> JudgeText | None:
        """Returns the answer, or None if another try may succeed; the reason is then in `last_error`."""
        import aiohttp

        try:
            async with self._opened().post(self._url, json=body, allow_redirects=False) as response:
                data = await _read(response)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.last_error = f"{self._url}: {type(error).__name__}: {error}"
            return None
        if status >= 500 or status in _LATER:
            self.last_error = f"{self._url}: {status}: {_shown(data)}"
            return None
        if status != 200:
            raise JudgeRefused(f"{self._url}: {status}: {_shown(data)}")
        try:
            return _openai_text(data)
        except ValueError as error:
            raise JudgeRefused(f"{self._url}: a reply that cannot be read: {_shown(data)}") from error

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            self._session = aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),  # the caller has the deadline
            )
        return self._session

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body; raises JudgeRefused if the body has more than `MAX_BYTES` bytes."""
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > MAX_BYTES:
            raise JudgeRefused(f"a reply of more than {MAX_BYTES >> 20} MiB")
    return bytes(data)


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    total_tokens: Natural = 0


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None


def _openai_text(data: bytes) -> JudgeText:
    """Parses a reply. Raises ValueError for an invalid reply, including a reply with a lone surrogate."""
    reply = decoded(data, _Completion)
    choice, usage = reply.choices[0], reply.usage or _Usage()
    return JudgeText(text=choice.message.content, is_cut=choice.finish_reason == "length", tokens=usage.total_tokens)


def _shown(data: bytes) -> str:
    return printable_text(data[:200].decode(errors="replace"))
