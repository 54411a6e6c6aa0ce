"""Maps the conversations of a session to the sampled tokens: a forest of messages with the answers in it.

A request is a list of messages. Its walk through the forest begins at the root of its tools and takes one step for each
message. An assistant's message that repeats an answer sampled at the current node leads to the node after this answer.
The next prompt continues after the deepest such answer, with its sampled tokens and not with the client's text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from relax_core.rollout.agents.chat_messages import ChatMessage, Identity, Reply, compared


@dataclass(eq=False, kw_only=True)
class ConversationNode:
    """Holds a node: the conversation state after some messages. ``answers`` were requested here, in order."""

    steps: dict[Hashable, ConversationNode] = field(default_factory=dict)
    answers: list[TreeAnswer] = field(default_factory=list)

    def step(self, key: Hashable) -> ConversationNode:
        """Returns the node after one more message."""
        return self.steps.setdefault(key, ConversationNode())


@dataclass(eq=False, kw_only=True)
class TreeAnswer:
    """Holds one answer that was requested at a node, ``number`` in the order of the session's requests.

    Requests for an answer at one node with equal ``kind`` are the same request. ``parent`` is the answer whose
    tokens the prompt continues, or None if the chat template rendered the whole prompt. ``opening`` numbers these
    rendered prompts; an answer has the number of its parent. ``near`` is the deepest answer in the conversation.
    ``prompt_ids`` are all tokens before the answer. ``sampled`` are all tokens of the answer; they and ``reply`` are
    set once it has ended. ``given``: a client has received it. ``abandoned``: the client that requested it hung up.
    ``after`` is the node after it.
    """

    number: int
    kind: Hashable
    parent: TreeAnswer | None
    near: TreeAnswer | None
    opening: int
    prompt_ids: list[int]
    sampled: list[int] = field(default_factory=list)
    reply: Reply | None = None
    given: bool = False
    abandoned: bool = False
    after: ConversationNode = field(default_factory=ConversationNode)


@dataclass(frozen=True, kw_only=True)
class TreePosition:
    """Holds the position of a request in the forest.

    ``place`` is the node after all of its messages. ``known`` is the deepest answer, which the prompt
    continues; it is None if there is no answer or if a foreign answer follows it. ``rest`` is the text that the
    client has appended to that answer, in the same message, and ``tail`` are the messages after it. ``nearest`` is
    the deepest answer on the path, even if it is not ``known``. ``foreign`` are the unreported assistant messages
    that repeat no sampled answer although their node has sampled answers.
    """

    place: ConversationNode
    known: TreeAnswer | None
    rest: str
    tail: Sequence[ChatMessage]
    nearest: TreeAnswer | None
    foreign: Sequence[ChatMessage]


class ConversationTree:
    """Holds the messages and answers of one session."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, ConversationNode] = {}
        self._openings = self._asked = 0
        self._told: set[tuple[int, Identity]] = set()  # nodes and foreign messages that were reported
        self.answers: list[TreeAnswer] = []

    def walk(self, messages: Sequence[ChatMessage], *, tools: Hashable) -> TreePosition:
        """Returns the position of a conversation with these tools. A foreign message is reported once for its node."""
        place = self._roots.setdefault(tools, ConversationNode())
        known: TreeAnswer | None = None
        nearest: TreeAnswer | None = None
        rest, behind = "", 0
        foreign: list[ChatMessage] = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                place = place.step(message.identity)
                continue
            found, extra = _found(place, message)
            if found is None:
                told = (id(place), message.identity)
                if any(answer.reply is not None for answer in place.answers) and told not in self._told:
                    self._told.add(told)
                    foreign.append(message)
                place, known = place.step(message.identity), None
                continue
            known = nearest = found
            rest, behind = extra, index + 1
            place = found.after if not extra else found.after.step(("rest", extra))
        if known is None:
            rest, behind = "", 0
        return TreePosition(
            place=place, known=known, rest=rest, tail=messages[behind:], nearest=nearest, foreign=tuple(foreign)
        )

    def repeated(self, walk: TreePosition, *, kind: Hashable, asked_again: bool) -> TreeAnswer | None:
        """Returns the answer for a repeated request, in flight or ended; None for a new request.

        With ``asked_again`` the client marks the request as a retry. Otherwise a request repeats an equal
        request whose client hung up before it had the answer; equal requests of two waiting clients get two
        answers.
        """
        equal = [answer for answer in walk.place.answers if answer.kind == kind]
        lost = [answer for answer in equal if not answer.given]
        if asked_again:
            return next(iter(reversed(lost or equal)), None)
        return next((answer for answer in reversed(lost) if answer.abandoned), None)

    def ask(self, walk: TreePosition, *, kind: Hashable, prompt_ids: list[int], whole: bool) -> TreeAnswer:
        """Adds an answer that is about to be sampled; ``whole``: the chat template rendered its whole prompt."""
        if whole or walk.known is None:
            opening, parent = self._openings, None
            self._openings += 1
        else:
            opening, parent = walk.known.opening, walk.known
        answer = TreeAnswer(
            number=self._asked, kind=kind, parent=parent, near=walk.nearest, opening=opening, prompt_ids=prompt_ids
        )
        self._asked += 1
        self.answers.append(answer)
        walk.place.answers.append(answer)
        return answer

    def withdraw(self, place: ConversationNode, answer: TreeAnswer) -> None:
        """Removes an answer that the engines failed to give, so that the next equal request is a new request."""
        place.answers.remove(answer)
        self.answers.remove(answer)

    def orphans(self) -> list[TreeAnswer]:
        """Returns the ended answers that no client has received; no conversation continues after them."""
        return [answer for answer in self.answers if answer.reply is not None and not answer.given]


def _found(place: ConversationNode, message: ChatMessage) -> tuple[TreeAnswer | None, str]:
    """Returns the newest answer at a node that a message repeats, or else the longest answer that it begins with.

    The text is the rest of the message after the answer.
    """
    begun: list[tuple[int, TreeAnswer, str]] = []
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
    _, answer, rest = max(begun, key=lambda pair: pair[0])
    answer.given = True
    return answer, rest
