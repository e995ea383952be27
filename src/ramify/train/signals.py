"""Ctrl-C and SIGTERM, under the name by which training knows them: see :mod:`ramify.signals`."""

from ramify.signals import stop_signals

__all__ = ["stop_signals"]
