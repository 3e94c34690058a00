"""`kernelwright serve`: the judge as an HTTP reward service."""

from __future__ import annotations

import logging
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kernelwright.cli.commands import FiniteRange, OptionsCommand, option
from kernelwright.cli.options import AT_LEAST_ONE, JudgeOptions, device_option, kept_in, resolve_device
from kernelwright.cli.output import INTERRUPTED, say

if TYPE_CHECKING:
    from kernelwright.execution.work import Executor
    from kernelwright.judge import Settings


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Serve the judge over HTTP, for trainers that run elsewhere (docs/rewards.md).

    Prints the service's address on stdout once it answers. Ctrl-C or SIGTERM lets evaluations that have begun end; a
    second one does not wait. Whatever was finished is in DIR.
    """

    host: str = option("127.0.0.1", metavar="ADDRESS", help="Where to listen.")
    port: int = option(8730, type=click.IntRange(0, 65535), metavar="N", help="0 takes any free one.")
    device: str = device_option()
    token_file: Path | None = option(
        metavar="FILE", help="File with the token that callers must bring. Default: the variable KERNELWRIGHT_TOKEN."
    )
    queue_limit: int = option(
        256, "--queue", type=AT_LEAST_ONE, metavar="N", help="Requests that may wait; more are told to ask again later."
    )
    per_device: int | None = option(type=AT_LEAST_ONE, metavar="N", help="Judges for each device.")
    ray_address: str | None = option(flag="--ray", metavar="ADDRESS", help="Judge on a Ray cluster: its address, or auto.")
    out: Path = option(
        Path("runs/serve"),
        metavar="DIR",
        help="Run directory; a service that is started again in it remembers what it has judged.",
    )
    drain_s: float = option(
        120.0,
        "--drain",
        type=FiniteRange(min=0),
        metavar="SECONDS",
        help="At shutdown, how long evaluations that have begun may take to end.",
    )
    builtin_only: bool = option(False, help="Refuse tasks that are not built in: their code runs unconfined.")
    judge: JudgeOptions

    def __call__(self) -> int:
        settings = self.judge.settings()
        try:
            import fastapi  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            from kernelwright.errors import ConfigError

            raise ConfigError(
                f"Wanted FastAPI and uvicorn, to serve; {error}. Install them with `pip install 'kernelwright[serve]'`."
            ) from error

        from kernelwright.execution.service import app
        from kernelwright.execution.service.app import create_app
        from kernelwright.execution.service.queue import EvaluationQueue, EvaluationStore
        from kernelwright.judge.isolation import sandbox

        # Candidates run as the same user: they must not find the token in this process.
        sandbox.hide_memory()
        token = app.take_token(self.token_file)
        with ExitStack() as stack:
            listener = stack.enter_context(app.listen(self.host, self.port, token))
            executor, kind, hardware = (_here if self.ray_address is None else _on_ray)(stack, self, settings)
            store = EvaluationStore(self.out, kind, settings, hardware)
            stack.callback(store.close)
            queue = EvaluationQueue(
                executor,
                store,
                settings,
                queue_limit=self.queue_limit,
                drain_s=self.drain_s,
                builtin_only=self.builtin_only,
            )

            def ready() -> None:
                click.echo(app.url_of(listener))
                count = f"{queue.lanes} judge{'s' * (queue.lanes > 1)}"
                say(f"{count} on {kind}; {len(store)} evaluations on record in {self.out}")
                if token is None:
                    say("no token: every user of this machine can call this service, and run code as you through it")

            logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
            logging.getLogger("kernelwright.execution.service").setLevel(logging.INFO)
            number = app.run(create_app(queue, token), queue, listener, self.drain_s, ready)
        say(f"ended: {kept_in(self.out)}")
        return INTERRUPTED if number == signal.SIGINT else 0


command = OptionsCommand("serve", ServeCommand, short_help="The judge as an HTTP reward service.")


def _here(stack: ExitStack, options: ServeCommand, settings: Settings) -> tuple[Executor, str, None]:
    from kernelwright.execution.executor import LocalExecutor
    from kernelwright.judge import devices_of

    resolve_device(options.device)
    devices = devices_of(options.device)
    executor = stack.enter_context(LocalExecutor(devices, settings, judges=options.per_device))
    return executor, devices[0].partition(":")[0], None


def _on_ray(stack: ExitStack, options: ServeCommand, settings: Settings) -> tuple[Executor, str, list[str]]:
    from kernelwright.execution.ray_executor import RayExecutor

    executor = stack.enter_context(
        RayExecutor(settings, device=options.device, address=options.ray_address, per_gpu=options.per_device or 1)
    )
    return executor, executor.device, executor.hardware
