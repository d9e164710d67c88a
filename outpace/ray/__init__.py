"""Replicas of the server as an application of Ray Serve.

    serve run outpace.ray:app model=smollm2-135m replicas=2

A front reads each request and hands it to the replica that has read its beginning before. `relay` and
`beginnings` know nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outpace.config import build
from outpace.errors import UnknownNameError
from outpace.ray.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """The application, for ``serve run`` and for the field ``import_path`` of a config file.

    Args:
        args: fields of ``Settings``.

    Raises:
        OutpaceError: an unknown setting, or a value that does not fit.
    """
    from outpace.ray.deployments import application

    return application(read_settings(args))


def read_settings(args: Mapping[str, Any]) -> Settings:
    """Settings as a command line or a config file gives them.

    Raises:
        OutpaceError: as for ``app``.
    """
    known = list(Settings.__slots__)
    for key in args:
        if key not in known:
            raise UnknownNameError("setting of outpace.ray:app", key, known)
    return build(Settings, {key: str(value) for key, value in args.items()}, "outpace.ray:app")
