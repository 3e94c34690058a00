"""`kernelwright serve`: the judge as an HTTP reward service."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli import options
from kernelwright.cli.output import INTERRUPTED, say

if TYPE_CHECKING:
    from kernelwright.execution.evaluator import Evaluator
    from kernelwright.judge import Settings


@click.command("serve", short_help="The judge as an HTTP reward service.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8730, show_default=True, metavar="N", help="0 takes any free one."
)
@options.device_option
@click.option(
    "--token-file",
    type=options.NamedPath(),
    metavar="FILE",
    help="File with the token that callers must bring. Default: the variable KERNELWRIGHT_TOKEN.",
)
@click.option(
    "--queue",
    "queue_limit",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="N",
    help="Requests that may wait; more are told to ask again later.",
)
@click.option("--per-device", type=click.IntRange(min=1), metavar="N", help="Judges for each device.")
@click.option("--ray", "ray_address", metavar="ADDRESS", help="Judge on a Ray cluster: its address, or auto.")
@click.option(
    "--out",
    type=options.NamedPath(),
    default=Path("runs/serve"),
    show_default=True,
    metavar="DIR",
    help="Run directory; a service that is started again in it remembers what it has judged.",
)
@click.option(
    "--drain",
    "drain_s",
    type=options.FiniteRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="At shutdown, how long evaluations that have begun may take to end.",
)
@click.option("--builtin-only", is_flag=True, help="Refuse tasks that are not built in: their code runs unconfined.")
@options.judge_options
def command(
    host: str,
    port: int,
    device: str,
    token_file: Path | None,
    queue_limit: int,
    per_device: int | None,
    ray_address: str | None,
    out: Path,
    drain_s: float,
    builtin_only: bool,
    **judge: Any,
) -> int:
    """Serve the judge over HTTP, for trainers that run elsewhere (docs/scale.md).

    Prints the service's address on stdout once it answers. Ctrl-C or SIGTERM lets evaluations that have begun end; a
    second one does not wait. Whatever was finished is in DIR.
    """
    settings = options.judge_settings(**judge)
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        from kernelwright.errors import ConfigError

        raise ConfigError(
            f"Wanted FastAPI and uvicorn, to serve; {error}. Install them with `pip install 'kernelwright[serve]'`."
        ) from error

    import logging

    from kernelwright.execution.service import server
    from kernelwright.execution.service.app import create_app
    from kernelwright.execution.service.queue import EvaluationQueue
    from kernelwright.execution.service.store import EvaluationStore
    from kernelwright.judge.isolation import sandbox

    # Candidates run as the same user: they must not find the token in this process.
    sandbox.hide_memory()
    token = server.take_token(token_file)
    with ExitStack() as stack:
        listener = stack.enter_context(server.listen(host, port, token))
        if ray_address is None:
            options.resolve_device(device, say)
            judges, kind, hardware = _here(stack, device, settings, per_device)
        else:
            judges, kind, hardware = _on_ray(stack, device, settings, per_device, ray_address)
        store = EvaluationStore(out, kind, settings, hardware)
        stack.callback(store.close)
        queue = EvaluationQueue(judges, store, settings, queue_limit=queue_limit, drain_s=drain_s, builtin_only=builtin_only)

        def ready() -> None:
            click.echo(server.url_of(listener))
            say(f"{len(judges)} judge{'s' * (len(judges) > 1)} on {kind}; {len(store)} evaluations on record in {out}")
            if token is None:
                say("no token: every user of this machine can call this service, and run code as you through it")

        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("kernelwright.execution.service").setLevel(logging.INFO)
        number = server.run(create_app(queue, token), queue, listener, drain_s, ready)
    say(f"ended: {options.kept_in(out)}")
    return INTERRUPTED if number == signal.SIGINT else 0


def _here(stack: ExitStack, device: str, settings: Settings, per_device: int | None) -> tuple[list[Evaluator], str, None]:
    """One pool of a single slot for each judge, so that each can be given its next job by itself."""
    from kernelwright.execution.local import JUDGES_PER_GPU, JudgePool
    from kernelwright.judge import devices_of

    devices = devices_of(device)
    kind = devices[0].partition(":")[0]
    count = per_device or (JUDGES_PER_GPU if kind == "cuda" else 1)
    judges: list[Evaluator] = [stack.enter_context(JudgePool([one], settings)) for _ in range(count) for one in devices]
    return judges, kind, None


def _on_ray(
    stack: ExitStack, device: str, settings: Settings, per_device: int | None, address: str
) -> tuple[list[Evaluator], str, list[str]]:
    """One pool, as often as it has slots: several threads may use it."""
    from kernelwright.execution.ray_pool import RayPool

    pool = stack.enter_context(RayPool(settings, device=device, address=address, per_gpu=per_device or 1))
    return [pool] * pool.slots, pool.device, pool.hardware
