"""Maps the conversations of a session to sampled tokens, with a forest of messages and sampled answers.

A request is a list of messages. The position of a request in the forest is found by a walk: it begins at the root for
the request's tools, and each message leads to the next node. If an assistant's message repeats an answer that was
sampled at the current node, the message leads to the node after this answer. The prompt of the request continues after
the deepest repeated answer, with the sampled tokens in place of the client's text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from relax_core.rollout.agents.chat_messages import ChatMessage, Identity, Reply, compared


@dataclass(eq=False, kw_only=True)
class ConversationNode:
    """Holds a node: the state of a conversation after some messages.

    ``steps`` maps messages to the next nodes. ``answers`` are the answers that were requested at this node, in order.
    """

    steps: dict[Hashable, ConversationNode] = field(default_factory=dict)
    answers: list[TreeAnswer] = field(default_factory=list)

    def step(self, key: Hashable) -> ConversationNode:
        """Returns the node after one more message; a missing node is added."""
        return self.steps.setdefault(key, ConversationNode())


@dataclass(eq=False, kw_only=True)
class TreeAnswer:
    """Holds one answer that was requested at a node.

    ``number`` is the number of the answer in the session, in the order of requests. Two requests at the same node are
    equal if they have the same ``kind``. ``parent`` is the earlier answer that the prompt continues, or None if the
    chat template rendered the complete prompt. ``opening`` is the number of this rendered prompt; answers that continue
    it have the same ``opening``. ``near`` is the deepest answer in the conversation before this answer. ``prompt_ids``
    are all tokens before the answer. ``sampled``, all tokens of the answer, and ``reply`` are set when the answer ends.
    ``given`` is True if a client has received the answer. ``abandoned`` is True if the clients that requested the
    answer hung up. ``after`` is the node after the answer.
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

    ``place`` is the node after all messages of the request. ``nearest`` is the deepest sampled answer on the path, or
    None. ``known`` is the answer that the prompt continues: ``nearest``, or None if a foreign message of the assistant
    follows ``nearest``. ``rest`` is the text that the client has appended to the message of ``known``, and ``tail`` are
    the messages after this message. ``foreign`` has assistant messages that differ from all sampled answers at their
    node; each is reported only once.
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
        self._told: set[tuple[int, Identity]] = set()  # foreign messages that were reported, with their nodes
        self.answers: list[TreeAnswer] = []

    def walk(self, messages: Sequence[ChatMessage], *, tools: Hashable) -> TreePosition:
        """Returns the position of a conversation with these tools. A foreign message is reported once per node."""
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

        With ``asked_again`` the client marks the request as a retry. Without this mark, a request is a repetition if
        the client of an equal request hung up before the client received the answer. Equal requests of two waiting
        clients get two answers.
        """
        equal = [answer for answer in walk.place.answers if answer.kind == kind]
        lost = [answer for answer in equal if not answer.given]
        if asked_again:
            return next(iter(reversed(lost or equal)), None)
        return next((answer for answer in reversed(lost) if answer.abandoned), None)

    def ask(self, walk: TreePosition, *, kind: Hashable, prompt_ids: list[int], whole: bool) -> TreeAnswer:
        """Adds an answer before it is sampled; ``whole``: the chat template rendered the complete prompt."""
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
        """Removes an answer that was not sampled. The next equal request is then a new request."""
        place.answers.remove(answer)
        self.answers.remove(answer)

    def orphans(self) -> list[TreeAnswer]:
        """Returns the ended answers that no client has received. No conversation continues after such answers."""
        return [answer for answer in self.answers if answer.reply is not None and not answer.given]


def _found(place: ConversationNode, message: ChatMessage) -> tuple[TreeAnswer | None, str]:
    """Returns the newest answer that a message repeats, or else the longest answer that the message begins with.

    Only the answers at the node are compared. The returned text is the part of the message after the answer.
    """
    begun: list[tuple[int, TreeAnswer, str]] = []
    for answer in reversed(place.answers):
        if answer.reply is None:
            continue
        grade, rest = compared(message, answer.reply)
        if grade == "same":
            answer.given = True  # the message proves that the client has the answer
            return answer, ""
        if grade == "begins":
            begun.append((-len(rest), answer, rest))
    if not begun:
        return None, ""
    _, answer, rest = max(begun, key=lambda pair: pair[0])
    answer.given = True
    return answer, rest
