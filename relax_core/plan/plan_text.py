"""Formats the plan for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from relax_core.plan.batch import plural
from relax_core.plan.build_plan import Plan
from relax_core.plan.memory.memory_terms import Holder, size_words

_WIDTH = 118


def as_text(plan: Plan) -> str:
    """Returns the plan as text of a few screens, with the verdict first."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield from _verdict(plan)
    for number, warning in enumerate(plan.warnings):
        yield from ("", *_wrapped("Warning   " if number == 0 else " " * 10, warning.split(" "), between=""))
    model = plan.model
    experts = f", {model.experts.count} experts, {model.experts.per_token} a token" if model.experts else ""
    towers = "".join(f", {name} tower {size / 1e6:.0f}M" for name, size in model.towers.items())
    yield ""
    yield (
        f"Model     {model.name} ({model.family}): {model.parameters / 1e6:,.1f}M parameters, {model.layers} layers, "
        f"hidden {model.hidden}, {model.heads} heads, {model.kv_heads} key-value heads{experts}{towers}"
    )
    roles = ", ".join(role if count == 1 else f"{count} x {role}" for role, count in plan.roles.items())
    yield f"Services  {roles}; bus, metrics, controller"
    yield from _section("Placement", _placement(plan))
    yield from _section("Data", plan.data)
    yield from _section("Batch", plan.batch)
    yield from _section("Media", plan.media)
    yield from _section("Context", plan.context)
    yield from _section("Episodes", plan.episodes)
    yield from _section("Credits", plan.credits)
    yield from _section("Memory", _memory(plan))
    yield from _section("Engines", plan.engines)
    yield from _section("Sync", _transfers(plan))
    if plan.unread:
        yield from _section("Unread", (f"{setting}." for setting in plan.unread))


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.refused:
        yield f"{plan.name}: this cannot work:"
        yield from (f"  - {problem}" for problem in plan.refused)
    elif plan.not_yet:
        yield f"{plan.name}: plans, but cannot start yet:"
    else:
        yield f"{plan.name}: can start."
    if plan.not_yet and plan.refused:
        yield "and it cannot start yet:"
    yield from (f"  - {problem}" for problem in plan.not_yet)


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{title if number == 0 else '':<10}{line}"


def _placement(plan: Plan) -> Iterator[str]:
    if plan.places and not any(one.gpus for one in plan.places):
        yield "every process on this machine's CPU cores"
        ranks = [f"{one.name} ({one.coordinates})" for one in plan.places if one.coordinates]
        if ranks:
            yield from _wrapped("ranks ", ranks)
        return
    for node in sorted({one.node for one in plan.places}):
        on_gpus: dict[str, list[str]] = {}
        for one in (one for one in plan.places if one.node == node):
            gpus = f"{one.gpus[0]}-{one.gpus[-1]}" if len(one.gpus) > 1 else str(one.gpus[0])
            on_gpus.setdefault(gpus, []).append(one.name + (f" ({one.coordinates})" if one.coordinates else ""))
        yield from _wrapped(f"node {node}  GPU ", [f"{gpus}: {' + '.join(names)}" for gpus, names in on_gpus.items()])


def _wrapped(head: str, words: list[str], *, between: str = ",") -> Iterator[str]:
    line, indent = head, " " * len(head)
    for number, word in enumerate(words):
        end = "" if number == len(words) - 1 else between
        if len(line) + len(word) > _WIDTH and line.strip():
            yield line.rstrip()
            line = indent
        line += f"{word}{end} "
    yield line.rstrip()


def _memory(plan: Plan) -> Iterator[str]:
    if not plan.memory:
        return
    on_gpus = any(holder.limit for holder in plan.memory)
    yield "peak of each GPU, by phase" if on_gpus else "peak resident memory of each process, by phase"
    for holder in plan.memory:
        if on_gpus or not _only_imports(holder):
            yield from _holder(holder)
    if not on_gpus:
        small = [holder for holder in plan.memory if _only_imports(holder)]
        rest = sum(holder.count * holder.peak.bytes for holder in small)
        yield f"{sum(holder.count for holder in small)} other processes: {size_words(rest)}, their imports"
        free = f", {size_words(plan.free_bytes)} are free" if plan.free_bytes is not None else ""
        yield f"all at their peaks at the same time: {size_words(plan.total_bytes)}{free}"
    fits = f", {plan.cache_tokens_fit} would fit" if plan.cache_tokens_fit is not None else ""
    yield f"KV cache of an engine: {plan.cache_tokens} tokens{fits}"


def _only_imports(holder: Holder) -> bool:
    return all(not size or name == "imports" for phase in holder.phases for name, size in phase.terms.items())


def _holder(holder: Holder) -> Iterator[str]:
    limit = f" of {size_words(holder.limit)}" if holder.limit else ""
    peak = holder.peak
    yield f"{holder.count} x {holder.name}: {size_words(peak.bytes)}{limit}, in {peak.name}"
    for phase in holder.phases:
        terms = [f"{name} {size_words(size)}" for name, size in phase.terms.items() if size]
        yield from _wrapped(f"    {phase.name:<9} {size_words(phase.bytes):>9} = ", terms)


def _transfers(plan: Plan) -> Iterator[str]:
    transfers = plan.transfers
    if transfers.kept_set_bytes:
        yield (
            f"kept sets: {transfers.kept_set_bytes} bytes a sampled token and "
            f"{size_words(transfers.kept_step_bytes)} a train step at most; a set of n tokens takes 4 + 4 n bytes"
        )
    yield (
        f"weights: {size_words(transfers.sync_bytes)} a version, {plural(transfers.receivers, 'receiver')}; published "
        f"versions take {size_words(transfers.published_bytes)} at most"
    )
    yield f"to the engines by {transfers.transport}: {transfers.transport_reason}"
    yield (
        f"checkpoint: {size_words(transfers.checkpoint_bytes)}; {transfers.checkpoints_kept} are kept, "
        f"{size_words(transfers.checkpoints_kept * transfers.checkpoint_bytes)} on disk"
    )
    if transfers.passed_bytes:
        yield f"an export copies {size_words(transfers.passed_bytes)} of tensors that are not computed from model.path"
