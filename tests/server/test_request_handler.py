"""One request on the event loop: whoever leaves is noticed at whatever moment it happens."""

import asyncio
import sys
import time

import pytest

from outpace import Engine
from outpace.errors import RequestError, ServiceClosed
from outpace.server.app import create_app
from outpace.server.metrics import Meters
from outpace.server.request_handler import Mailbox, RequestHandler
from outpace.serving.batch import Ticket
from outpace.serving.events import Failed, ServiceStats, Tokens
from outpace.serving.service import Service
from tests.server.conftest import LIMITS, Client

BODY = {"prompt": "ab", "max_tokens": 3}


class Asked:
    """What a call reads of a request."""

    requests, n, answers = (object(),), 1, 1


class Silent:
    """A service that says what it is told to say."""

    def submit(self, request, listen, *, key):
        self.listen, self.ticket = listen, Ticket(lambda: None)
        return self.ticket


class Forgetful(RequestHandler):
    """A call that waits with a limit, which before Python 3.12 may swallow a cancellation."""

    async def _next(self):
        return await asyncio.wait_for(self._queue.get(), 20)


def leaves(kind, first):
    """Whether a call notices that it is cancelled in the turn of the loop that brings an event."""
    service = Silent()

    async def go():
        mail = Mailbox(asyncio.get_running_loop())
        call = kind(service, Asked(), Meters("m", ServiceStats), mail, time.perf_counter(), 20)
        call.start("")

        async def read():
            async for _ in call.events():
                pass

        reader = asyncio.ensure_future(read())
        for _ in range(3):
            await asyncio.sleep(0)
        event = Tokens(index=0, ids=(1,), text="a", accepted=0)
        steps = [lambda: service.listen(event), lambda: asyncio.get_running_loop().call_soon(reader.cancel)]
        for step in steps if first == "event" else reversed(steps):
            step()
        await asyncio.wait({reader}, timeout=0.3)
        noticed = reader.cancelled() and service.ticket.cancelled
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        return noticed

    return asyncio.run(go())


def test_a_loop_is_woken_once_for_what_a_pass_gives_and_hears_all_of_it_in_order():
    async def go():
        loop, queues = asyncio.get_running_loop(), [asyncio.Queue() for _ in range(3)]
        mail = Mailbox(loop)
        woken, wake = [], loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *what: woken.append(1) or wake(*what)

        def tell(numbers):
            for number in numbers:
                mail.post(queues[number % 3], number)

        for numbers in (range(9), range(9, 12)):
            before = len(woken)
            tell(numbers)
            assert len(woken) == before + 1
            await asyncio.sleep(0)
        loop.call_soon_threadsafe = wake
        await asyncio.to_thread(tell, range(12, 3000))
        return [[queue.get_nowait() for _ in range(queue.qsize())] for queue in queues], mail

    heard, mail = asyncio.run(go())
    assert heard == [list(range(first, 3000, 3)) for first in range(3)]
    mail.post(asyncio.Queue(), 1)  # nobody listens any more


@pytest.mark.parametrize("first", ["event", "cancel"])
def test_who_leaves_at_the_moment_an_event_comes_is_noticed(first):
    assert leaves(RequestHandler, first)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="wait_for was mended")
def test_the_test_can_fail():
    assert not leaves(Forgetful, "event")


def test_a_service_that_has_broken_says_so(engine, monkeypatch):
    """Everybody is told, nobody is let in any more, and a supervisor can see it."""
    monkeypatch.setattr("threading.excepthook", lambda hook: None)
    events = []
    with Service(Engine(engine.target, "none"), drafters=("none",)) as service:
        client = Client(create_app(service, name="tiny", limits=LIMITS))
        assert client.get("/health").json() == {"status": "ok"}
        assert not service.closing and service.broken is None

        def lost(slots):
            raise RuntimeError("a defect")

        monkeypatch.setattr(service._batch, "stats", lost)
        request = service.request("ab", max_new_tokens=3)
        service.submit(request, events.append)
        service._thread.join(20)
        assert isinstance(service.broken, RuntimeError) and service.closing
        assert any(isinstance(event, Failed) for event in events)
        with pytest.raises(ServiceClosed, match="has broken down; start it anew"):
            service.submit(request, events.append)
        answer = client.get("/health")
        assert answer.status_code == 503 and "broken down" in answer.json()["error"]["message"]
        error = client.refused("/v1/completions", BODY, 503)
        assert "broken down" in error["message"] and error["type"] == "overloaded_error"
        assert service.stats().running == 0


def test_a_service_that_ends_says_so(engine):
    with Service(engine, drafters=("none",)) as service:
        client = Client(create_app(service, name="tiny", limits=LIMITS))
        service.close()
        answer = client.get("/health")
        assert answer.status_code == 503 and "stopping" in answer.json()["error"]["message"]
        error = client.refused("/v1/completions", BODY, 503)
        assert error["message"] == "the service is closing; it takes no more requests"


def test_answers_on_their_way_are_told_when_everything_breaks(engine, monkeypatch):
    """Those that ended in the very pass hear of their end, those that were sent away as well."""
    monkeypatch.setattr("threading.excepthook", lambda hook: None)
    heard = {name: [] for name in ("short", "first", "last")}
    long = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
    service = Service(Engine(engine.target, "none"), drafters=("none",), pages=7, stored_pages=0)
    batch, place = service._batch, service._batch._place

    def placed(row):
        if batch.victims:
            raise MemoryError("a defect")
        return place(row)

    monkeypatch.setattr(batch, "_place", placed)
    with service:
        for name, told in heard.items():
            own = {**long, "max_new_tokens": 1} if name == "short" else long
            service.submit(service.request([5, 9] * 30, **own), told.append)
        service._thread.join(20)
        assert isinstance(service.broken, MemoryError)
    assert heard["short"][-1].result.finish_reason == "length"
    for name in ("first", "last"):
        assert isinstance(heard[name][-1], Failed), name
        assert sum(isinstance(event, Failed) for event in heard[name]) == 1


def test_an_application_with_keys_refuses_a_store_for_all(engine, tmp_path):
    spec = f"suffix[store={tmp_path / 'past'}]"
    with Service(Engine(engine.target, "none"), drafters=(spec,)) as service:
        with pytest.raises(RequestError, match="add --share-across-keys"):
            create_app(service, name="tiny", keys=["k"], limits=LIMITS)
        create_app(service, name="tiny", limits=LIMITS)
    with Service(Engine(engine.target, "none"), drafters=(spec,), share_across_keys=True) as shared:
        create_app(shared, name="tiny", keys=["k"], limits=LIMITS)
