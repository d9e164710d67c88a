"""The command line: thin shells over the API."""

from outpace.cli import interrupts

if interrupts.is_command():
    interrupts.leave_at_once()  # before the other modules here, for their imports take a while
