"""Plays one attempt at an episode of an agent: answers the agent's requests, and records the answers as turns.

`SessionPrompts` makes the prompts. A prompt continues the sampled tokens of an earlier answer, or the chat template
renders the complete conversation. `SessionTable` maps keys to the sessions of an endpoint. A key gives access to one
session, and is valid until the session ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from hmac import compare_digest
from typing import Literal

import msgspec

from relax_core.contracts.engine import EngineError, Generated, PromptRequest
from relax_core.contracts.env import Ended, EpisodeLimits
from relax_core.contracts.untrusted_values import shown
from relax_core.data.chat_template import check_template_shows_tools
from relax_core.data.tokenizer import LARGE_TEXT, PromptTokenizer, TextTooLong
from relax_core.data.tool_parsers import AUTO, tool_parser
from relax_core.data.turn_tokens import TurnTokens
from relax_core.rollout.agents.answer_reading import THINK, AnswerForm, read_reply, thinks
from relax_core.rollout.agents.chat_messages import (
    ChatMessage,
    Finish,
    RequestRefused,
    TurnAnswer,
    TurnRequest,
    check_request,
    refused,
    template_messages,
)
from relax_core.rollout.agents.conversation_tree import ConversationNode, ConversationTree, TreeAnswer, TreePosition
from relax_core.rollout.episodes.episode_records import EpisodeRecord, PlayedTurn, response_text, stopped_by
from relax_core.rollout.episodes.shared_requests import SharedRequests
from relax_core.rollout.episodes.tool_use import ToolUse
from relax_core.rollout.prompt_tokens import PromptMaker, check_prompt_tokens, off_loop

_MAX_SIZES = 4  # limit of a body as a multiple of the longest prompt; a body also has escapes and omitted text


@dataclass(frozen=True, kw_only=True)
class SessionForm:
    """Holds the settings that all sessions of a run share.

    ``stop`` are the run's stop strings. ``max_turn_tokens`` limits the tokens of an answer; with None only ``limits``
    applies. ``sampling`` has the run's sampling parameters, by name; a request that asks for other values is logged.
    With ``history`` "continue", later prompts contain the sampled tokens. With "template", the chat template renders
    every prompt completely, as in a deployed server. ``tools_refused`` is the reason why requests with tools are
    refused. It is empty if they are served. ``open_requests`` is the largest number of concurrent requests of a
    session. ``told`` has the names of logged parameters.
    """

    prompts: PromptMaker
    requests: SharedRequests
    tools: ToolUse
    limits: EpisodeLimits
    stop: tuple[str, ...] = ()
    max_turn_tokens: int | None = None
    history: Literal["continue", "template"] = "continue"
    sampling: dict[str, float] = field(default_factory=dict)
    tools_refused: str = ""
    open_requests: int = 64
    told: set[str] = field(default_factory=set)


def tool_form(tokenizer: PromptTokenizer, *, as_text: bool) -> tuple[ToolUse, str]:
    """Returns the form of tools, and the reason why requests with tools are refused; empty if they are served.

    A template without tools is accepted at the start of a run, because only an agent's requests show whether it uses
    tools.
    """
    try:
        if not as_text:
            check_template_shows_tools(tokenizer)
        name = tool_parser("hermes" if as_text else AUTO, template=tokenizer.template)
    except ValueError as error:
        return ToolUse(parser="none", as_text=as_text), str(error)
    return ToolUse(parser=name, as_text=as_text), ""


class SessionPrompts:
    """Makes the prompts of one session."""

    def __init__(self, form: SessionForm) -> None:
        self._form = form
        self._between: dict[int, TurnTokens] = {}  # by `TreeAnswer.opening`

    def keep(self, asked: TreeAnswer, between: TurnTokens) -> None:
        """Stores the `TurnTokens` that continue the conversation of an answer with a completely rendered prompt."""
        self._between[asked.opening] = between

    def prompt(self, walk: TreePosition, request: TurnRequest) -> tuple[list[int], TurnTokens | None]:
        """Returns the tokens of a prompt; for a completely rendered prompt also the `TurnTokens` that continue it.

        Raises `RequestRefused` for messages and tools that the chat template does not accept.
        """
        tools = self._tools(request)
        try:
            if walk.known is not None and self._form.history == "continue" and (ids := self._going_on(walk, tools)):
                return ids, None
            return self._whole(request, tools)
        except TextTooLong as error:
            raise self.too_long(f"at least {error.tokens}") from error
        except ValueError as error:
            raise refused(f"messages: {error}") from error

    def too_long(self, tokens: str) -> RequestRefused:
        """Returns the refusal of a prompt that is too long; ``tokens`` is its number of tokens as text."""
        return refused(
            f"messages: they have {tokens} tokens, and engine.context_length leaves room for "
            f"{self._form.limits.context_tokens - 1}; shorten the history",
            code="context_length_exceeded",
        )

    def check_size(self, request: TurnRequest) -> None:
        """Raises `RequestRefused` if a request is far too long for the context; the request is not tokenised.

        A request may be longer than its prompt, because a chat template leaves out thinking and other text.
        """
        limit = self._form.limits.context_tokens
        if request.size <= LARGE_TEXT:
            return
        if request.size > _MAX_SIZES * self._form.prompts.tokenizer.max_characters(limit):
            raise self.too_long(f"at least {limit}")

    def _going_on(self, walk: TreePosition, tools: ToolUse) -> list[int]:
        """Returns the known answer's prompt, sampled tokens, and the new messages; empty if no tokens were sampled."""
        known, tokenizer = walk.known, self._form.prompts.tokenizer
        assert known is not None
        sampled = known.sampled
        if walk.rest:
            if sampled and sampled[-1] in tokenizer.stop_token_ids:
                sampled = sampled[:-1]
            rest = tokenizer.short_enough(walk.rest, self._form.limits.context_tokens)
            sampled = [*sampled, *tokenizer.encode_plain(rest)]
        if not sampled:
            return []
        between = self._between[known.opening]
        tail, limit = tools.shown(template_messages(walk.tail)), self._form.limits.context_tokens
        ids, _ = between.next_prompt(known.prompt_ids, sampled, tail, most_tokens=limit)
        return ids

    def _whole(self, request: TurnRequest, tools: ToolUse) -> tuple[list[int], TurnTokens]:
        """Returns the client's messages as the chat template renders them."""
        problem: ValueError | None = None
        for as_text in (False, True):  # a few templates expect the arguments of calls as JSON text
            messages = template_messages(request.messages, arguments_as_text=as_text)
            shown = tools.opening(tools.shown(messages))
            try:
                limit = self._form.limits.context_tokens
                prompt = self._form.prompts.edited(shown, [], tools=tools.schemas, most_tokens=limit)
                return prompt.token_ids, TurnTokens(self._form.prompts.tokenizer, shown, tools=tools.schemas)
            except TextTooLong:
                raise
            except ValueError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _tools(self, request: TurnRequest) -> ToolUse:
        """Returns the tools of a request in the run's form. Raises `RequestRefused` if the template leaves them out."""
        if not request.tools:
            return self._form.tools
        if self._form.tools_refused:
            raise refused(f"tools: {self._form.tools_refused}")
        return replace(self._form.tools, described=tuple(request.tools))


log = logging.getLogger(__name__)
SHOWN = 80  # characters of a foreign message in the log
_SHOWN_WISH = 40  # characters
LAST_TOKENS = 16  # number of last tokens of a prompt that are searched for the tag <think>


@dataclass(eq=False, kw_only=True)
class OpenTurn:
    """Holds one answer, in flight or ended.

    ``tokens`` grows while the answer is sampled. ``grew`` is set when ``tokens`` has grown or the answer has ended.
    ``anew`` is True if an engine was lost and another engine started the answer again with other tokens.
    ``conversation`` has the messages of the request without instructions, and ``place`` is the node after these
    messages. ``answer`` is set when the answer has ended, and ``failure`` when it has failed. ``clients`` has one
    function per waiting request, which returns whether the request's client has hung up.
    """

    request: TurnRequest
    conversation: Sequence[ChatMessage]
    asked: TreeAnswer
    place: ConversationNode
    form: AnswerForm
    rid: str
    began_s: float
    tokens: list[int] = field(default_factory=list)
    grew: asyncio.Event = field(default_factory=asyncio.Event)
    anew: bool = False
    answer: TurnAnswer | None = None
    failure: RequestRefused | None = None
    response: Generated | None = None
    task: asyncio.Task[None] | None = None
    clients: list[Callable[[], bool]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Returns True once the answer has ended or failed."""
        return self.answer is not None or self.failure is not None

    def given(self) -> None:
        """Records that a client has received the complete answer, as far as the endpoint's server can know."""
        self.asked.given, self.asked.abandoned = True, False

    def hung_up(self) -> None:
        """Records that a client hung up; if no other client waits, the next equal request gets the answer."""
        if not self.clients and not self.asked.given:
            self.asked.abandoned = True

    def look(self) -> None:
        """Marks the answer as abandoned if all clients have hung up, also if the event loop has not noticed yet."""
        if self.clients and not self.asked.given and all(has_hung_up() for has_hung_up in self.clients):
            self.asked.abandoned = True


class AgentSession:
    """Plays one attempt at an episode, and writes the result to ``record``.

    ``request_of(number, prompt, most)`` returns the engine request for answer ``number`` with at most ``most`` tokens.
    ``on_response`` is called with the rid of each engine request that has ended. ``tie`` chooses among equally loaded
    engines. A failure of the engines ends ``tasks``. ``on_end`` is called once if a limit ends the episode, with the
    rids of the engine requests in flight. ``ends_early`` returns an end and its reason if the episode must not request
    further answers; such an end is treated as a limit.

    ``asked`` is set when the first engine request starts, and ``answered`` when the first answer has ended.
    """

    def __init__(
        self,
        form: SessionForm,
        record: EpisodeRecord,
        *,
        request_of: Callable[[int, list[int], int], PromptRequest],
        tie: int,
        tasks: asyncio.TaskGroup,
        on_response: Callable[[str], None] = lambda rid: None,
        on_end: Callable[[list[str]], None] = lambda rids: None,
        ends_early: Callable[[], tuple[Ended, str] | None] = lambda: None,
    ) -> None:
        self._form = form
        self.record = record
        self._request_of = request_of
        self._tie = tie
        self._tasks = tasks
        self._on_response, self._on_end, self._ends_early = on_response, on_end, ends_early
        self._forest = ConversationTree()
        self._prompts = SessionPrompts(form)
        self._turns: dict[TreeAnswer, OpenTurn] = {}
        self._ended: list[OpenTurn] = []  # ordered by the time of their end
        self.counts: Counter[str] = Counter()
        self.seen_s = time.monotonic()
        self.asked, self.answered = asyncio.Event(), asyncio.Event()
        self._asking = asyncio.Lock()  # requests are served in the order of their arrival
        self.over = False

    @property
    def sampled_tokens(self) -> int:
        """Returns the total number of tokens of ended answers."""
        return sum(len(turn.response.output_ids) for turn in self._ended if turn.response is not None)

    @property
    def under_way(self) -> list[OpenTurn]:
        """Returns the answers in flight."""
        return [turn for turn in self._turns.values() if not turn.done]

    # -- requests -----------------------------------------------------------------------------------------------------
    async def ask(self, request: TurnRequest, *, asked_again: bool = False) -> OpenTurn:
        """Returns the answer to a request, in flight or ended; for a new request, starts the answer.

        ``asked_again`` is True if the client marks the request as a retry. The prompt of a large request is made in a
        thread; the session's next requests wait for this prompt. Raises `RequestRefused`.
        """
        self.seen_s = time.monotonic()
        async with self._asking:
            return await self._ask(request, asked_again=asked_again)

    async def _ask(self, request: TurnRequest, *, asked_again: bool) -> OpenTurn:
        self._check_open()
        self._prompts.check_size(request)
        self.counts["requests"] += 1
        self._count_wishes(request)
        conversation = self._conversation(request)
        request = replace(request, messages=conversation).with_instructions()
        if request.previous:
            check_request(request)
        walk = self._forest.walk(request.messages, tools=_tools_key(request))
        self._log_foreign_history(walk)
        kind: Hashable = (request.stop, request.max_tokens)
        for answer in walk.place.answers:  # a client may hang up and retry before the event loop notices
            self._turns[answer].look()
        if (before := self._forest.repeated(walk, kind=kind, asked_again=asked_again)) is not None:
            self.counts["repeated"] += 1
            return self._turns[before]
        if len(self.under_way) >= self._form.open_requests:
            raise RequestRefused(
                429, f"{len(self.under_way)} requests of this episode are under way; ask again", retry_after_s=1
            )
        self._check_limits()
        large = request.size > LARGE_TEXT
        prompt_ids, between = await off_loop(large, lambda: self._prompts.prompt(walk, request))
        self._check_open()
        most = self._room(prompt_ids, request)
        asked = self._forest.ask(walk, kind=kind, prompt_ids=prompt_ids, whole=between is not None)
        if between is not None:
            self._prompts.keep(asked, between)
        return self._start(request, conversation, asked, walk.place, most=most)

    def _check_open(self) -> None:
        if self.over:
            raise RequestRefused(410, "this episode has ended; its key is no longer valid", code="episode_ended")

    def _conversation(self, request: TurnRequest) -> list[ChatMessage]:
        """Returns the messages of a request after the conversation of its ``previous`` answer; without instructions."""
        if not request.previous:
            return list(request.messages)
        for turn in self._ended:
            name = f"_{self.record.uid}_{turn.asked.number}"
            if request.previous.endswith(name) and turn.asked.reply is not None:
                turn.asked.given = True  # the request proves that the client has the answer
                return [*turn.conversation, turn.asked.reply.message(), *request.messages]
        raise refused(
            "previous_response_id: no answer of this session that has ended has this id; send the complete input",
            code="previous_response_not_found",
        )

    def _start(
        self,
        request: TurnRequest,
        conversation: Sequence[ChatMessage],
        asked: TreeAnswer,
        place: ConversationNode,
        *,
        most: int,
    ) -> OpenTurn:
        tokenizer = self._form.prompts.tokenizer
        opening = tokenizer.decode(asked.prompt_ids[-LAST_TOKENS:]).rstrip()
        engine = self._request_of(asked.number, asked.prompt_ids, most)
        turn = OpenTurn(
            request=request,
            conversation=conversation,
            asked=asked,
            place=place,
            form=AnswerForm(
                opened=opening.endswith(THINK),
                parser=self._form.tools.parser,
                tools=request.tools,
                stop=(*request.stop, *self._form.stop),
            ),
            rid=engine.rid,
            began_s=time.time(),
        )
        self._turns[asked] = turn
        self.asked.set()
        sampling = self._sample(turn, engine)
        try:
            turn.task = self._tasks.create_task(sampling)
        except RuntimeError:  # the task group is ending, so the session ends, too
            sampling.close()
            raise RequestRefused(503, "the run ends") from None
        return turn

    async def _sample(self, turn: OpenTurn, engine: PromptRequest) -> None:
        """Samples an answer; a failure of the engines is stored for the requests that wait for this answer."""

        def tell(start: int, ids: Sequence[int]) -> None:
            turn.anew = turn.anew or turn.tokens[start : start + len(ids)] not in ([], list(ids))
            turn.tokens[start:] = ids
            turn.grew.set()

        try:
            response = await self._form.requests.generate(
                engine,
                tie=self._tie,
                tasks=self._tasks,
                stop=turn.request.stop,
                tell=tell if turn.request.stream else None,
            )
            check_prompt_tokens(engine, [response])
            self._take(turn, response)
        except EngineError as error:
            turn.failure = RequestRefused(503, f"the engines failed: {error}")
            raise
        except asyncio.CancelledError:
            self._forest.withdraw(turn.place, turn.asked)
            del self._turns[turn.asked]
            turn.failure = RequestRefused(
                410 if self.over else 503, "the answer was abandoned, because the episode or the run ends"
            )
            if self.over:
                raise
        finally:
            turn.grew.set()
            self.answered.set()
            self.seen_s = time.monotonic()
            self._on_response(turn.rid)

    def _take(self, turn: OpenTurn, response: Generated) -> None:
        tokenizer = self._form.prompts.tokenizer
        ids = response.output_ids.tolist()
        stopped = response.finish_reason == "stop"
        shown = ids[:-1] if stopped and ids and ids[-1] in tokenizer.stop_token_ids else ids
        text = tokenizer.decode(shown)
        reply = read_reply(text, turn.form, number=turn.asked.number)
        turn.asked.sampled, turn.asked.reply = ids, reply
        turn.tokens, turn.response = shown, response
        finish: Finish = "length"
        if stopped:
            finish = "tool_calls" if reply.calls else "stop"
        turn.answer = TurnAnswer(
            number=turn.asked.number,
            reply=reply,
            finish=finish,
            stopped_by=stopped_by(text, turn.form.stop) if stopped else None,
            prompt_ids=turn.asked.prompt_ids,
            token_ids=ids,
            cached_tokens=response.cached_tokens,
            reasoning_tokens=_share_of(ids, thinks(text, turn.form), len(text)),
            created_s=int(turn.began_s),
        )
        self._ended.append(turn)
        self.counts["cut_behind_stop"] += len(reply.full) > len(reply.content) and bool(turn.answer.stopped_by)
        turn.task = None
        self._played(turn, ended_s=time.time())

    def _played(self, turn: OpenTurn, *, ended_s: float) -> None:
        """Adds an ended answer to the turns of the record."""
        response, asked = turn.response, turn.asked
        assert response is not None and turn.answer is not None
        after = None if asked.near is None else [ended_turn.asked for ended_turn in self._ended].index(asked.near)
        self.record.turns.append(
            PlayedTurn(
                prompt_ids=asked.prompt_ids,
                response=response,
                began_s=turn.began_s,
                ended_s=ended_s,
                tools=[call.name for call in turn.answer.reply.calls],
                after=after,
            )
        )
        text = response_text(response, tokenizer=self._form.prompts.tokenizer)
        self.record.texts.append(text)
        self.record.stop_string = turn.answer.stopped_by or ""
        self.record.tool_calls += len(turn.answer.reply.calls)
        self.record.messages = [
            *template_messages(turn.request.messages),
            {"role": "assistant", "content": text},
        ]

    # -- limits -------------------------------------------------------------------------------------------------------
    def _check_limits(self) -> None:
        """Ends the episode and raises if its turns or tokens are used up, or if ``ends_early`` returns an end."""
        limits = self._form.limits
        reason: Ended | None = None
        if len(self._turns) >= limits.turns:
            reason = "max_turns"
            words = f"the episode has used its {limits.turns} answers (env.max_turns)"
        elif self.sampled_tokens >= limits.sampled_tokens:
            reason = "token_budget"
            words = f"the episode has sampled its {limits.sampled_tokens} tokens (rollout.max_new_tokens)"
        elif (early := self._ends_early()) is not None:
            reason, words = early
        if reason is not None:
            self._on_end(self.end(reason))
            raise RequestRefused(410, words, code=reason)

    def _room(self, prompt_ids: Sequence[int], request: TurnRequest) -> int:
        """Returns the token limit of an answer; only the episode's ended answers reduce the limit."""
        context = self._form.limits.context_tokens
        if len(prompt_ids) >= context:
            raise self._prompts.too_long(str(len(prompt_ids)))
        given = (request.max_tokens, self._form.max_turn_tokens)
        left = self._form.limits.sampled_tokens - self.sampled_tokens
        return min(left, context - len(prompt_ids), *(limit for limit in given if limit is not None))

    # -- the log ------------------------------------------------------------------------------------------------------
    def _count_wishes(self, request: TurnRequest) -> None:
        for name, value in request.wishes.items():
            if self._form.sampling.get(name, object()) == value:
                continue
            self.counts["wishes"] += 1
            if name not in self._form.told:
                self._form.told.add(name)
                message = shown(value, _SHOWN_WISH)
                log.info("an agent asks for %s=%s, which the run decides; this is logged once", name, message)

    def _log_foreign_history(self, walk: TreePosition) -> None:
        for message in walk.foreign:
            if not self.counts["foreign"]:  # later foreign messages of an episode are only counted
                log.info(
                    "%s: an assistant's message was not sampled here: a segment begins: %r",
                    self.record.uid,
                    message.content[:SHOWN],
                )
            self.counts["foreign"] += 1

    # -- the end ------------------------------------------------------------------------------------------------------
    def end(self, reason: Ended | None = None) -> list[str]:
        """Ends the session: the key becomes invalid, and answers in flight are cancelled.

        Removes answers that no client received from the turns of the record, and counts their tokens as orphans.
        Returns the rids of the engine requests in flight.
        """
        if self.over:
            return []
        self.over = True
        if reason is not None:
            self.record.ended = reason
        under_way = self.under_way
        for turn in under_way:
            if turn.task is not None:
                turn.task.cancel()
        self._leave_out_orphans()
        self.counts["segments"] = sum(self._is_leaf(turn) for turn in self._ended)
        return [turn.rid for turn in under_way]

    def _leave_out_orphans(self) -> None:
        orphans = set(self._forest.orphans())
        kept = [place for place, turn in enumerate(self._ended) if turn.asked not in orphans]
        record, moved = self.record, {place: number for number, place in enumerate(kept)}
        record.orphan += sum(len(orphan.sampled) for orphan in orphans)
        turns = [record.turns[place] for place in kept]
        record.turns = [turn if turn.after is None else replace(turn, after=moved[turn.after]) for turn in turns]
        record.texts = [record.texts[place] for place in kept]
        self._ended = [self._ended[place] for place in kept]

    def _is_leaf(self, turn: OpenTurn) -> bool:
        """Returns True if no later prompt begins with the answer's prompt and all of its sampled tokens."""
        whole = [*turn.asked.prompt_ids, *turn.asked.sampled]
        return not any(
            ended_turn.asked.near is turn.asked and ended_turn.asked.prompt_ids[: len(whole)] == whole
            for ended_turn in self._ended
        )


def _tools_key(request: TurnRequest) -> Hashable:
    return msgspec.json.encode(request.tools, order="sorted")


def _share_of(ids: Sequence[int], characters: int, whole: int) -> int:
    """Estimates how many of the tokens ``ids`` belong to ``characters`` of the text's ``whole`` characters."""
    return round(len(ids) * characters / whole) if whole else 0


KEY_BYTES = 32
KNOWN_ENDED = 1 << 16  # ended keys that the table remembers, to distinguish them from unknown keys
RETRY_S = 5


class SessionTable:
    """Maps the digests of keys to at most ``most`` open sessions; the keys themselves are not stored."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._open: dict[bytes, AgentSession] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session: AgentSession) -> str:
        """Adds a session and returns its key. Raises `RequestRefused` 429 if too many sessions are open."""
        if len(self._open) >= self._most:
            raise RequestRefused(429, f"{self._most} sessions are open; ask again", retry_after_s=RETRY_S)
        key = f"rlx-{secrets.token_urlsafe(KEY_BYTES)}"
        self._open[_digest(key)] = session
        return key

    def find(self, key: str) -> AgentSession:
        """Returns the session of a key. Raises `RequestRefused` 401 for an unknown key, 410 for an ended session."""
        digest = _digest(key)
        found = next((session for known, session in self._open.items() if compare_digest(known, digest)), None)
        if found is not None and not found.over:
            return found
        if found is not None or digest in self._ended:
            raise RequestRefused(410, "the episode of this key has ended; a new attempt has a new key", code="ended")
        raise RequestRefused(
            401,
            "no session has this key. An agent's key is in its environment (OPENAI_API_KEY, ANTHROPIC_API_KEY); send "
            "it as a bearer token, as x-api-key, or in the base URL as /s/KEY/v1",
            code="invalid_api_key",
        )

    def close(self, key: str) -> None:
        """Invalidates a key."""
        digest = _digest(key)
        if self._open.pop(digest, None) is not None:
            self._ended[digest] = None
            if len(self._ended) > KNOWN_ENDED:
                self._ended.popitem(last=False)


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="surrogatepass"), digest_size=32).digest()
