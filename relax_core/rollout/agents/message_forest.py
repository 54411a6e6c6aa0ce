"""Maps the conversations of a session to what was sampled in it: a forest of messages with the answers in it.

A request is a list of messages. Its walk through the forest begins at the root of its tools and takes one step for each
message. The step of an assistant's message leads over the answer that it is, if an answer was sampled at that place.
The deepest such answer is what the next prompt goes on from, with its sampled tokens and not with the client's text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from relax_core.rollout.agents.chat_messages import ChatMessage, Identity, Reply, compared


@dataclass(eq=False, kw_only=True)
class Place:
    """Is a place in a conversation: behind some messages. ``answers`` were asked for here, in order."""

    steps: dict[Hashable, Place] = field(default_factory=dict)
    answers: list[ForestAnswer] = field(default_factory=list)

    def step(self, key: Hashable) -> Place:
        """Returns the place behind one more message."""
        return self.steps.setdefault(key, Place())


@dataclass(eq=False, kw_only=True)
class ForestAnswer:
    """Is one answer that was asked for at a place, ``number`` in the order of the session's requests.

    ``kind`` holds what makes two requests for an answer at one place the same request. ``parent`` is the answer whose
    tokens the prompt goes on from, None for a prompt that was rendered whole, and ``near`` the deepest answer in the
    conversation; ``opening`` numbers the conversation that
    was rendered whole. ``prompt_ids`` are all tokens before the answer. ``sampled`` are all tokens of the answer; they
    and ``reply`` are there once it has ended. ``given`` says that a client has it, and ``abandoned`` that the client
    that asked for it hung up. ``after`` is the place behind it.
    """

    number: int
    kind: Hashable
    parent: ForestAnswer | None
    near: ForestAnswer | None
    opening: int
    prompt_ids: list[int]
    sampled: list[int] = field(default_factory=list)
    reply: Reply | None = None
    given: bool = False
    abandoned: bool = False
    after: Place = field(default_factory=Place)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Is where a request stands in the forest.

    ``place`` is behind all of its messages. ``known`` is the answer that the prompt goes on from, None if there is none
    or if a foreign answer stands behind it. ``rest`` is the text that the client has put behind that answer, in the
    same message, and ``tail`` are the messages behind it. ``nearest`` is the deepest answer on the way, also if it is
    not ``known``. ``foreign`` are messages of an assistant that stand where answers were sampled and are none of them.
    """

    place: Place
    known: ForestAnswer | None
    rest: str
    tail: Sequence[ChatMessage]
    nearest: ForestAnswer | None
    foreign: Sequence[ChatMessage]


class MessageForest:
    """Holds the messages and answers of one session."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Place] = {}
        self._openings = self._asked = 0
        self._told: set[tuple[int, Identity]] = set()  # places with foreign messages that were reported
        self.answers: list[ForestAnswer] = []

    def walk(self, messages: Sequence[ChatMessage], *, tools: Hashable) -> Walk:
        """Returns where a conversation with these tools stands. A foreign message is reported once at its place."""
        place = self._roots.setdefault(tools, Place())
        known: ForestAnswer | None = None
        nearest: ForestAnswer | None = None
        rest, behind = "", 0
        foreign: list[ChatMessage] = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                place = place.step(message.identity)
                continue
            found, extra = _found(place, message)
            if found is None:
                told = (id(place), message.identity)
                if any(one.reply is not None for one in place.answers) and told not in self._told:
                    self._told.add(told)
                    foreign.append(message)
                place, known = place.step(message.identity), None
                continue
            known = nearest = found
            rest, behind = extra, index + 1
            place = found.after if not extra else found.after.step(("rest", extra))
        if known is None:
            rest, behind = "", 0
        return Walk(
            place=place, known=known, rest=rest, tail=messages[behind:], nearest=nearest, foreign=tuple(foreign)
        )

    def repeated(self, walk: Walk, *, kind: Hashable, asked_again: bool) -> ForestAnswer | None:
        """Returns the answer that a repeated request gets, under way or ended; None if the request is a new one.

        With ``asked_again`` the client says that it repeats a request. Else a request repeats one whose client hung up
        before it had the answer; two equal requests of clients that wait are two answers.
        """
        equal = [one for one in walk.place.answers if one.kind == kind]
        lost = [one for one in equal if not one.given]
        if asked_again:
            return next(iter(reversed(lost or equal)), None)
        return next((one for one in reversed(lost) if one.abandoned), None)

    def ask(self, walk: Walk, *, kind: Hashable, prompt_ids: list[int], whole: bool) -> ForestAnswer:
        """Adds an answer that is about to be sampled; ``whole``: its prompt was rendered whole."""
        if whole or walk.known is None:
            opening, parent = self._openings, None
            self._openings += 1
        else:
            opening, parent = walk.known.opening, walk.known
        answer = ForestAnswer(
            number=self._asked, kind=kind, parent=parent, near=walk.nearest, opening=opening, prompt_ids=prompt_ids
        )
        self._asked += 1
        self.answers.append(answer)
        walk.place.answers.append(answer)
        return answer

    def withdraw(self, place: Place, answer: ForestAnswer) -> None:
        """Forgets an answer that the engines did not give, so that the next equal request is a new one."""
        place.answers.remove(answer)
        self.answers.remove(answer)

    def orphans(self) -> list[ForestAnswer]:
        """Returns the ended answers that no client has got, which no conversation goes on from."""
        return [one for one in self.answers if one.reply is not None and not one.given]


def _found(place: Place, message: ChatMessage) -> tuple[ForestAnswer | None, str]:
    """Returns the answer at a place that a message is, the newest of equal ones, and the text that it has behind it.

    If it is none of them, the longest answer that it begins with is returned.
    """
    begun: list[tuple[int, ForestAnswer, str]] = []
    for answer in reversed(place.answers):
        if answer.reply is None:
            continue
        grade, rest = compared(message, answer.reply)
        if grade == "same":
            answer.given = True  # the client shows that it has the answer
            return answer, ""
        if grade == "begins":
            begun.append((-len(rest), answer, rest))
    if not begun:
        return None, ""
    _, answer, rest = max(begun, key=lambda one: one[0])
    answer.given = True
    return answer, rest
