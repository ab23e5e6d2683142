"""Whether an end was lost, by what replicas say that they hold and have sent."""

from app.engine_client import Holding, Placed
from app.transport.carriers import Carriers
from app.transport.token_stream import ServeTokenStream

AT = Placed("replica", 1, carries=True)


def placed(carriers: Carriers) -> ServeTokenStream:
    stream = ServeTokenStream("r", None, lambda _: None)
    carriers.add(stream)
    carriers.place(stream, AT)
    return stream


def answer(*request_ids: str, sent: int | None = None) -> list[Holding]:
    return [Holding("replica", frozenset(request_ids), {} if sent is None else {1: sent})]


def test_an_end_is_lost_when_all_that_was_sent_is_read_without_it() -> None:
    carriers = Carriers()
    stream = placed(carriers)
    for sent in (2, 9):
        assert carriers.check(answer(sent=sent), carriers.placed()), "it may be in the first two messages"
        assert not stream.ended
        carriers.read(AT)
    assert not carriers.check(answer(sent=9), carriers.placed())
    assert stream.ended


def test_what_is_held_is_not_lost() -> None:
    carriers = Carriers()
    stream = placed(carriers)
    assert carriers.check(answer(sent=0), carriers.placed())
    assert not carriers.check(answer("r", sent=0), carriers.placed())
    assert carriers.check(answer(sent=0), carriers.placed()), "and begins anew"
    assert not stream.ended


def test_a_carrier_that_is_closed_there_brings_the_rest_while_something_comes() -> None:
    carriers = Carriers()
    stream = placed(carriers)
    for _ in range(3):
        assert carriers.check(answer(), carriers.placed())
        carriers.read(AT)
    assert carriers.check(answer(), carriers.placed())
    assert not carriers.check(answer(), carriers.placed())
    assert stream.ended


def test_an_answer_says_nothing_of_what_came_after_the_question() -> None:
    carriers = Carriers()
    before = carriers.placed()
    stream = placed(carriers)
    for _ in range(3):
        assert not carriers.check(answer(sent=0), before)
    assert not stream.ended
