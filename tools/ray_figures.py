"""Measures an application of Ray Serve here: cached prompts, a replica that is killed, an end in order.

    python tools/ray_figures.py [--model smollm2-135m] [--requests 32] [--json]

It starts a Ray of its own, with two CPUs and 200 MB for objects, and stops it. Needs the extra `ray`.

1. Conversations of several turns, with the router of `outpace.ray` and with that of Ray Serve: how many
   tokens of prompts were found stored.
2. Requests on two replicas, half of them streams; one replica is killed (SIGKILL) among them. Each request
   must be answered, unless it was a stream that the killed replica had begun: that ends with an error.
3. A stream under way while the application is stopped: it must end as it would have.

Exits with 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from outpace.ray import read_settings
from outpace.ray.deployments import application
from outpace.ray.relay import LOST, REPLICA

CHAT = "/v1/chat/completions"
TOPICS = "rivers stars bridges bread glaciers violins harbours maps".split()


@dataclass
class Heard:
    """What a client got."""

    stream: bool
    status: int
    replica: str
    retries: int
    ended: bool
    """Whether it was told why it ended."""
    error: str = ""
    cached: int = 0
    prompt: int = 0
    text: str = ""


async def ask(client: httpx.AsyncClient, messages: list[dict[str, str]], tokens: int, stream: bool) -> Heard:
    """One request of a client that does not try again."""
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": 0,
    }
    if not stream:
        answer = await client.post(CHAT, json=body)
        told = answer.json()
        heard = Heard(False, answer.status_code, *_headers(answer), ended="choices" in told)
        if "error" in told:
            heard.error = told["error"]["message"]
        else:
            heard.text = told["choices"][0]["message"]["content"]
            heard.prompt = told["usage"]["prompt_tokens"]
            heard.cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return heard
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        heard = Heard(True, answer.status_code, *_headers(answer), ended=False)
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            told = json.loads(data)
            if "error" in told:
                heard.error = told["error"]["message"]
            for choice in told.get("choices", ()):
                heard.text += choice["delta"].get("content") or ""
                heard.ended |= choice["finish_reason"] is not None
    return heard


def _headers(answer: httpx.Response) -> tuple[str, int]:
    return answer.headers.get(REPLICA, ""), int(answer.headers.get(LOST, "0"))


def replicas() -> set[int]:
    """Process ids of the replicas that this program started."""
    parents, found = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        parents[int(folder.name)] = int(stat[1])
        if title.startswith(b"ray::ServeReplica:default:Replica"):
            found.add(int(folder.name))

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return {pid for pid in found if ours(pid)}


async def conversations(client: httpx.AsyncClient, turns: int) -> tuple[int, int]:
    """Tokens of prompts, and of these found stored: talks that each grow, all at once."""

    async def talk(topic: str) -> tuple[int, int]:
        rules = " ".join(f"Rule {n}: when you speak of {topic}, be brief and exact." for n in range(36))
        messages = [{"role": "system", "content": rules}]
        read = stored = 0
        for turn in range(turns):
            messages.append({"role": "user", "content": f"Tell me fact {turn} about {topic}."})
            heard = await ask(client, messages, 16, stream=False)
            read, stored = read + heard.prompt, stored + heard.cached
            messages.append({"role": "assistant", "content": heard.text})
        return read, stored

    both = await asyncio.gather(*map(talk, TOPICS))
    return sum(one[0] for one in both), sum(one[1] for one in both)


async def killed(client: httpx.AsyncClient, count: int, tokens: int) -> dict[str, Any]:
    """Requests under way on two replicas, one of which is killed."""
    before = replicas()
    asked = [
        asyncio.create_task(
            ask(client, [{"role": "user", "content": f"Count from {n}."}], tokens, n % 2 == 0)
        )
        for n in range(count)
    ]
    while sum(task.done() for task in asked) < count // 8:
        await asyncio.sleep(0.02)
    open_before = sum(not task.done() for task in asked)
    os.kill(min(before), signal.SIGKILL)
    at = time.monotonic()
    heard = await asyncio.gather(*asked)
    answered = time.monotonic() - at
    while not (len(replicas() - before) and len(replicas()) == len(before)):
        await asyncio.sleep(0.1)
    again = time.monotonic() - at
    cut = [one for one in heard if not one.ended]
    alive = {one.replica for one in heard if one.ended}
    page = (await client.get("/metrics")).text
    gone = {one.replica for one in cut if f'replica="{one.replica}"' not in page}
    return {
        "requests": count,
        "under way at the kill": open_before,
        "answered at once": sum(one.ended and not one.retries for one in heard),
        "answered after a retry": sum(one.ended and bool(one.retries) for one in heard),
        "streams cut, with an error": sum(bool(one.error) and one.stream for one in cut),
        "lost otherwise": sum(not (one.stream and one.error) for one in cut)
        + sum(one.replica not in gone for one in cut),
        "errors": dict(Counter(one.error for one in cut)),
        "seconds to the last answer": round(answered, 2),
        "seconds to a new process": round(again, 2),
        "replicas that answered": len(alive - {""}),
    }


async def drained(client: httpx.AsyncClient) -> dict[str, Any]:
    """A stream while the application is stopped."""
    question = [{"role": "user", "content": "Tell me a long story."}]
    plain = await ask(client, question, 200, stream=True)
    began = time.monotonic()
    stream = asyncio.create_task(ask(client, question, 200, stream=True))
    await asyncio.sleep(0.3)
    under_way = not stream.done()
    await asyncio.to_thread(serve.delete, "default")
    heard = await stream
    return {
        "under way when told to stop": under_way,
        "same text as undisturbed": heard.text == plain.text,
        "ended": heard.ended,
        "seconds": round(time.monotonic() - began, 2),
    }


def run(model: str, count: int, tokens: int) -> dict[str, Any]:
    """All figures."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        "local",
        num_cpus=2,
        object_store_memory=200 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    figures: dict[str, Any] = {}
    settings = read_settings({"model": model, "replicas": 2, "drafter": "prompt_lookup", "max_ongoing": 8})
    plain = RequestRouterConfig()

    async def measured(what: Any, *more: Any) -> Any:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            return await what(client, *more)

    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        for name, routing in (("Ray Serve's router", plain), ("by beginnings", None)):
            serve.run(application(settings, routing))
            began = time.monotonic()
            read, stored = asyncio.run(measured(conversations, 4))
            figures[name] = {
                "prompt tokens": read,
                "found stored": stored,
                "share": round(stored / read, 3),
                "seconds": round(time.monotonic() - began, 1),
            }
            if routing is not None:
                serve.delete("default")
        figures["kill"] = asyncio.run(measured(killed, count, tokens))
        figures["stop"] = asyncio.run(measured(drained))
    finally:
        serve.shutdown()
        ray.shutdown()
    return figures


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = run(given.model, given.requests, given.tokens)
    if given.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, rows in figures.items():
            print(f"\n{name}")
            for key, value in rows.items():
                print(f"  {key:32} {value}")
    kill, stop = figures["kill"], figures["stop"]
    fine = kill["lost otherwise"] == 0 and stop["ended"] and stop["same text as undisturbed"]
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
