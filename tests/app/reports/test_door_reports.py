"""What the ingress tells of its queue."""

import asyncio

from app.admission import Admission, Budget, Claim
from app.reports.door_reports import report_queue
from app.reports.signals import DoorReport


async def test_it_tells_while_anything_waits_and_once_that_nothing_does() -> None:
    admission = Admission(Budget(1), max_waiting=10)
    sent: list[DoorReport] = []
    ticks = asyncio.Semaphore(0)

    async def send(report: DoorReport) -> None:
        sent.append(report)
        if len(sent) == 1:
            raise RuntimeError("there is no replica")

    async def sleep(_: float) -> None:
        await ticks.acquire()

    async def tick() -> None:
        ticks.release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    task = asyncio.ensure_future(report_queue("me", admission, send, sleep))
    await tick()
    tickets = admission.reserve([Claim(100)] * 3)
    await tick()
    await tick()
    for ticket in tickets:
        ticket.release()
    await tick()
    await tick()
    task.cancel()
    assert [(report.ingress, report.waiting, report.tokens) for report in sent] == [
        ("me", 2, 200),
        ("me", 2, 200),
        ("me", 0, 0),
    ]
    assert sent[0].age_s >= 0
