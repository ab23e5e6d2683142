"""Messages of tokens: what is added up while nobody reads, and what goes where."""

from app.transport.outbox import Outbox, split
from engine.outputs import Finished, FinishReason, StepOutput, TokenLogprobs

ENTRY = TokenLogprobs([5], [-0.5], 1)


def end(request_id: str) -> Finished:
    return Finished(request_id, FinishReason.LENGTH, 2, 1, 0)


async def test_what_nobody_has_read_is_added_up() -> None:
    outbox = Outbox(1)
    outbox.add("a")
    outbox.put(StepOutput(["a"], [5], logprobs={"a": [ENTRY]}, prompt_logprobs={"a": [None]}, cached_tokens={"a": 16}))
    outbox.put(StepOutput(["a"], [6], [end("a")], logprobs={"a": [ENTRY]}, cached_tokens={"b": 32}))
    assert outbox.messages == 1
    assert await outbox.take() == StepOutput(
        ["a", "a"], [5, 6], [end("a")], {"a": [ENTRY, ENTRY]}, {"a": [None]}, {"a": 16, "b": 32}
    )
    assert not outbox.busy
    assert outbox.messages == 1


def test_each_ingress_gets_its_own_and_nobody_what_is_not_there() -> None:
    ours, theirs = Outbox(1), Outbox(2)
    names = ["a", "b", "gone"]
    output = StepOutput(
        names,
        [5, 6, 7],
        [end(name) for name in names],
        {name: [ENTRY] for name in names},
        {name: [None] for name in names},
        dict.fromkeys(names, 16),
    )
    assert split(output, {"a": ours, "b": theirs}) == {
        box: StepOutput([name], [token], [end(name)], {name: [ENTRY]}, {name: [None]}, {name: 16})
        for box, name, token in ((ours, "a", 5), (theirs, "b", 6))
    }
