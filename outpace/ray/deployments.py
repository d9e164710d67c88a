"""The two deployments: a front that knows no model, and replicas that each run one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from outpace.cli.keys import read_keys
from outpace.cli.options import AutoOptions
from outpace.cli.serve import body_bytes, with_reference
from outpace.config import split_specs
from outpace.ray.beginnings import blocks
from outpace.ray.metrics import merged
from outpace.ray.relay import REPLICA, Call, Handed, Relay, Unavailable, played
from outpace.ray.router import BeginningsRouter
from outpace.ray.scaling import ANSWERS, ByLoad
from outpace.ray.settings import Settings
from outpace.server.app import create_app, tell_errors
from outpace.server.errors import ApiError
from outpace.server.limits import Limits
from outpace.server.metrics import CONTENT_TYPE
from outpace.server.middleware import Defects, Guard, Message, Receive, Scope, Send
from outpace.server.run import host_names
from outpace.serving.service import Service

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_FRONT = Limits(body_bytes=64 << 20)
"""Replicas know their context and take less."""
_HTTP = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
_HTTP.add_middleware(Defects)
tell_errors(_HTTP)


def application(settings: Settings, routing: RequestRouterConfig | None = None) -> serve.Application:
    """Front and replicas, bound.

    Args:
        routing: how requests find a replica; None: by their beginnings.
    """
    least, most = settings.bounds
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        policy=AutoscalingPolicy(policy_function=ByLoad, policy_kwargs={"most": settings.max_ongoing}),
    )
    replicas = Replica.options(  # type: ignore[attr-defined]
        **({"num_replicas": most} if least == most else {"autoscaling_config": scaling}),
        max_ongoing_requests=settings.max_ongoing,
        max_queued_requests=settings.max_queue,
        graceful_shutdown_timeout_s=settings.grace,
        ray_actor_options={"num_cpus": settings.threads, "num_gpus": settings.gpus},
        request_router_config=routing
        or RequestRouterConfig(
            request_router_class=BeginningsRouter, request_router_kwargs={"busier": settings.busier}
        ),
    ).bind(settings)
    front = Front.options(graceful_shutdown_timeout_s=settings.grace + 5)  # type: ignore[attr-defined]
    return front.bind(settings, replicas)


def _keys(settings: Settings) -> list[str]:
    file = settings.api_key_file
    return read_keys([], None if file is None else Path(file))


@serve.deployment(health_check_period_s=5, graceful_shutdown_wait_loop_s=0.5)
class Replica:
    """One model behind the application of ``outpace serve``."""

    def __init__(self, settings: Settings) -> None:
        engine = AutoOptions(
            model=settings.model,
            dtype=settings.dtype,
            quantize=settings.quantize,
            device="cuda" if settings.gpus else "cpu",
            threads=settings.threads,
        ).load(drafter="none")
        engine.remember()
        self._service = Service(
            engine,
            drafters=with_reference(split_specs(settings.drafter)),
            max_batch=settings.max_ongoing,
            max_queue=settings.max_queue,
        )
        self._app = create_app(
            self._service,
            name=settings.name or engine.target.name,
            keys=_keys(settings),
            limits=Limits(body_bytes=body_bytes(engine, None), grace_seconds=settings.grace),
        )

    async def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        """The messages of the response to a call; its headers name this replica."""
        own = (REPLICA.encode(), serve.get_replica_context().replica_tag.encode())
        async for message in played(self._app, call):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], own]
            yield message

    async def figures(self) -> tuple[str, str]:
        """Name of this replica, and its page for Prometheus."""
        return serve.get_replica_context().replica_tag, self._app.state.server.meters.text().decode()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve: the load that the autoscaler adds up."""
        stats = self._service.stats()
        return {ANSWERS: float(stats.running + stats.waiting)}

    async def check_health(self) -> None:
        """Called by Ray Serve, which starts the replica anew where this fails.

        Raises:
            RuntimeError: the service has ended.
        """
        if self._service.closing:
            raise RuntimeError("the service has broken down") from self._service.broken

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close(drain=False)


@serve.deployment(
    max_ongoing_requests=1000, graceful_shutdown_wait_loop_s=0.5, ray_actor_options={"num_cpus": 0}
)
@serve.ingress(_HTTP)
class Front:
    """Reads requests, checks keys, and hands each to a replica."""

    def __init__(self, settings: Settings, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._answer = replicas.options(stream=True).answer
        keys, allowed = _keys(settings), settings.allowed_hosts
        hosts = host_names("127.0.0.1", keys, allowed.split(",") if allowed else ())
        relay = Relay(self._ask, blocks, (RayActorError,))
        self._relay = Guard(relay, keys=keys, hosts=hosts, limits=_FRONT)
        self._figures = Guard(self._page, keys=keys, hosts=hosts, limits=_FRONT)

    async def _ask(self, call: Call) -> AsyncGenerator[Message, None]:
        response = self._answer.remote(call)
        try:
            async for message in response:
                yield message
        except BackPressureError as error:
            full = ApiError(429, "all replicas are busy; try again later", headers={"Retry-After": "1"})
            raise Unavailable(full) from error
        except GeneratorExit:
            response.cancel()
            raise

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = await self._replicas.broadcast("figures").results_async(return_exceptions=True)
        page = merged(dict(one for one in found if isinstance(one, tuple)))
        await Response(page, media_type=CONTENT_TYPE)(scope, receive, send)

    @_HTTP.get("/metrics")
    async def metrics(self) -> Response:
        """Figures of all replicas."""
        return Handed(self._figures)

    @_HTTP.api_route("/{path:path}", methods=_METHODS)
    async def everything(self) -> Response:
        """All other paths, answered by a replica."""
        return Handed(self._relay)
