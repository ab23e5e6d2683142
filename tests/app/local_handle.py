"""A Serve handle without Serve: calls to engine replicas in the same process, that can be lost as a process is."""

import asyncio
import inspect
import itertools
import pickle
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any

from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from app.engine_client import EngineLimits
from app.replica import EngineReplica
from engine.lora.request import LoRARequest


class LocalCall:
    """A streaming call as Serve makes it: read ahead of its reader, and cancelled by a plain call."""

    def __init__(self, messages: AsyncGenerator[Any, None]) -> None:
        self._read: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._pump(messages))
        self._task.add_done_callback(self._end)
        self._lost: Exception | None = None
        self.cancelled = False

    def __aiter__(self) -> "LocalCall":
        return self

    async def __anext__(self) -> Any:
        message = await self._read.get()
        if isinstance(message, BaseException):
            raise message
        return pickle.loads(message)

    def cancel(self) -> None:
        self.cancelled = True
        self._task.cancel()

    def lose(self, error: Exception | None = None) -> None:
        """As if the process at the other end had been killed: what was on its way is gone too. error: how it shows."""
        self._lost = error or ConnectionError("killed")
        while not self._read.empty():
            self._read.get_nowait()
        self._task.cancel()

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def _pump(self, messages: AsyncGenerator[Any, None]) -> None:
        async with aclosing(messages):
            async for message in messages:
                self._read.put_nowait(pickle.dumps(message))

    def _end(self, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._read.put_nowait(self._lost or error or StopAsyncIteration())


class LocalAnswer:
    """Of one replica to a broadcast."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        answer = await self._answer if inspect.isawaitable(self._answer) else self._answer
        if isinstance(answer, Exception):
            raise answer
        return answer


class LocalBroadcast:
    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    async def _fetch_replica_results_async(self) -> list[LocalAnswer]:
        return [LocalAnswer(answer) for answer in self._answers]


class _LoadAdapter:
    def __init__(self, handle: "LocalHandle") -> None:
        self._handle = handle

    def remote(self, request: LoRARequest) -> Any:
        return self._handle.replicas[0].load_adapter(request)


class LocalHandle:
    """As much of a DeploymentHandle as `ServeEngineClient` uses, around replicas that are called in turn.

    calls: all that have been made. broadcasts: the same of those to every replica. avoided: replicas by name, which get
    no call. waiting: calls that wait for a replica. deleted: whether the deployment is, which those are not told.
    """

    def __init__(self, replicas: Sequence[EngineReplica]) -> None:
        self.replicas = list(replicas)
        self.submit = self.limits = self
        self.load_adapter = _LoadAdapter(self)
        self.calls: list[tuple[EngineReplica, LocalCall]] = []
        self.broadcasts: list[tuple[Any, ...]] = []
        self.avoided: Collection[str] = ()
        self.deleted = False
        self.waiting: set[Any] = set()
        self._unheard: dict[str, list[Callable[[], Any]]] = {}
        self._turns = itertools.count()

    def options(self, **_: Any) -> "LocalHandle":
        return self

    def remote(self, *args: Any) -> Any:
        if not args:
            return asyncio.ensure_future(self._limits())
        if not self.replicas:
            return LocalCall(self._unanswered())
        replicas = [replica for replica in self.replicas if replica.name not in self.avoided]
        replica = replicas[next(self._turns) % len(replicas)]
        call = LocalCall(replica.submit(*args))
        self.calls.append((replica, call))
        return call

    def kill(self, replica: EngineReplica) -> None:
        self.replicas.remove(replica)
        for where, call in self.calls:
            if where is replica and not call.ended:
                call.lose()

    def silence(self, replica: EngineReplica) -> None:
        """As if its process had been stopped: broadcasts get no answer."""
        self._unheard[replica.name] = []

    def wake(self, replica: EngineReplica) -> None:
        for call in self._unheard.pop(replica.name):
            call()

    def broadcast(self, method: str, *args: Any) -> LocalBroadcast:
        self.broadcasts.append((method, *args))
        return LocalBroadcast([self._answer(replica, method, args) for replica in self.replicas])

    async def _unanswered(self) -> AsyncGenerator[Any, None]:
        await self._replica()
        yield

    async def _replica(self) -> None:
        """There is one, or there is none and there never will be, which is told to those that come from now on."""
        if self.deleted:
            raise DeploymentUnavailableError(DeploymentID("engine"))
        if not self.replicas:
            call = asyncio.current_task()
            self.waiting.add(call)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.waiting.discard(call)

    async def _limits(self) -> EngineLimits:
        await self._replica()
        return self.replicas[0].limits()

    def _answer(self, replica: EngineReplica, method: str, args: tuple[Any, ...]) -> Any:
        if replica.name in self._unheard:
            self._unheard[replica.name].append(lambda: _call(replica, method, args))
            return asyncio.get_running_loop().create_future()
        return _call(replica, method, args)


def _call(replica: EngineReplica, method: str, args: tuple[Any, ...]) -> Any:
    try:
        answer = getattr(replica, method)(*args)
    except Exception as error:
        return error
    return True if method == "check_health" else answer
