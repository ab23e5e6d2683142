"""The `nanoserve` command: `build` what is compiled and fetched once, `serve` the application."""

import argparse
import os
import sys
from collections.abc import Sequence

from app.settings import load_settings
from engine.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nanoserve", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the CPU kernels and fetch the model, as serve does first")
    serve = commands.add_parser("serve", help="serve the model at http://127.0.0.1:8000 until Ctrl-C")
    for command in (build, serve):
        command.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="such as model=PATH max_model_len=2048")
    options = parser.parse_args(argv)
    try:
        settings = _pairs(options.settings)
        models = load_settings(settings).each
        if options.command == "serve":
            _check_port()
        _build([model.engine_config().model for model in models])
        if options.command == "serve":
            _serve(settings)
    except ConfigError as error:
        print(f"nanoserve: {error}", file=sys.stderr)
        return 2
    return 0


def _pairs(arguments: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or not value:
            raise ConfigError(f"settings are given as KEY=VALUE, got {argument!r}")
        pairs[name] = value
    return pairs


def _build(models: Sequence[str]) -> None:
    """Here and not in the replicas, so that progress and errors are seen in the terminal."""
    from engine.hub import resolve_model
    from kernels import cpu_ops
    from kernels.build import ensure_built
    from kernels.cpu_isa import isa_asked_for

    try:
        isa_asked_for()
        if library := ensure_built(verbose=True):
            cpu_ops.load()
    except ValueError as error:  # NANOSERVE_CPU_ISA, which every replica would fail on
        raise ConfigError(str(error)) from error
    print(f"CPU kernels: {library or 'none; torch computes instead'}")
    for model in models:
        print(f"model: {resolve_model(model)}")


def _check_port() -> None:
    """Raises `ConfigError` if a server would start here and something else has its port."""
    from app.building import cluster_is_named, port_in_use

    if not cluster_is_named() and (problem := port_in_use()) is not None:
        raise ConfigError(problem)


def _serve(settings: dict[str, str]) -> None:
    """Become `serve run`, so that Ctrl-C and everything else is Ray's own."""
    arguments = [f"{name}={value}" for name, value in settings.items()]
    application = ["app:build", *arguments] if arguments else ["app:deployment"]
    os.execv(sys.executable, [sys.executable, "-m", "ray.serve.scripts", "run", *application])


if __name__ == "__main__":
    sys.exit(main())
