"""Whether a server can listen on a port."""

from __future__ import annotations

import socket

from outpace.errors import OutpaceError


def check_port(host: str, port: int) -> None:
    """Listen for a moment, so that a port in use is said before a model is loaded.

    Raises:
        OutpaceError: the port is taken, or the host is none of this machine; with the system's reason.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no host has such a name"
        raise unusable(host, port, reason) from error


def unusable(host: str, port: int, reason: str) -> OutpaceError:
    """What to say of a port that cannot be used."""
    return OutpaceError(f"cannot listen on {host} port {port}: {reason}; name another --port or --host")
