"""`omnistage`: parses the command line and hands over to one command. Imports nothing heavy before that."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from omnistage.errors import OmniError

EXIT_ERROR = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; an `OmniError` becomes one line on stderr."""
    arguments = build_parser().parse_args(argv)
    module = importlib.import_module(f"omnistage.entrypoints.cli.{arguments.command.replace('-', '_')}")
    run: Callable[[argparse.Namespace], int] = vars(module)["run"]
    try:
        status = run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): nothing is left to be told, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OmniError as error:
        where = f" [{error.info.param}]" if error.info.param and error.info.param not in error.info.message else ""
        print(f"omnistage: {error.info.message}{where}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnistage", description="Serve and run omni-modality models as graphs of stages."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _serve(commands.add_parser("serve", help="start the OpenAI-compatible server"))
    _generate(commands.add_parser("generate", help="answer a file of requests offline"))
    _chat(commands.add_parser("chat", help="talk to a model in the terminal"))
    _plan(commands.add_parser("plan", help="what a deployment starts and whether its memory suffices; loads nothing"))
    _config(commands.add_parser("config", help="show, compare, import the configuration; its JSON schema"))
    models = commands.add_parser("models", help="list built-in pipelines and what they take and give")
    models.add_argument("--json", action="store_true", help="machine-readable output")
    _keys(commands.add_parser("keys", help="make an API key for serve --api-keys"))
    _bench(commands.add_parser("bench", help="measure a running server, compare two results"))
    replay = commands.add_parser("replay", help="run a record of serve --record, or a failed request of it, again")
    replay.add_argument("record", metavar="DIR", help="folder of the record, or one of its failures/")
    commands.add_parser("doctor", help="check this machine: versions, cores, memory, shared memory, media codecs")
    return parser


def _serve(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port; 0 lets the OS choose (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the address")
    parser.add_argument("--trace", metavar="FILE", default=None, help="write a Chrome trace of all requests (Perfetto)")
    parser.add_argument("--api-keys", metavar="FILE", default=None, help="key file: nothing is served without a key")
    parser.add_argument("--record", metavar="DIR", default=None, help="write a record for omnistage replay into DIR")


def _keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", required=True, metavar="FILE", help="key file to add a line to")
    parser.add_argument("--scopes", default="infer", help="infer, admin, metrics, separated by commas")
    parser.add_argument("--name", required=True, help="who the key is for, one word")


def _generate(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--requests", required=True, metavar="FILE", help="JSON lines, one request each")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for answers and media")
    parser.add_argument("--save-tensors", action="store_true", help="also write <id>.npz with one array per modality")


def _chat(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--system", default=None, help="system prompt")
    parser.add_argument("--speak", metavar="DIR", default=None, help="write each spoken answer as DIR/<turn>.wav")


def _plan(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable output, sizes in bytes")
    parser.add_argument(
        "--memory-mb", type=_positive, default=None, help="MiB of each device (default: this machine's)"
    )
    parser.add_argument("--tokens", type=_positive, default=0, help="typical length of a request, for the streams")


def _config(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print the resolved configuration as YAML")
    _model(show)
    show.add_argument("--origin", action="store_true", help="print where each value came from")
    schema = actions.add_parser("schema", help="print the JSON schema of a deploy file, for editors")
    schema.add_argument(
        "model", metavar="MODEL", nargs="?", default=None, help="also name its stages and their options"
    )
    imported = actions.add_parser("import", help="print a vLLM-Omni deploy file as one of ours")
    imported.add_argument("file", metavar="FILE", help="their YAML file")
    imported.add_argument("--model", default=None, help="pipeline, where the file does not say")
    diff = actions.add_parser("diff", help="values that differ between two deployments; status 1 when some do")
    _model(diff)
    diff.add_argument("--to", metavar="FILE", default=None, help="the other deploy file (default: none)")


def _bench(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="load on a server of the OpenAI routes")
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="server (default: %(default)s)")
    serve.add_argument("--model", required=True, help="served name")
    serve.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte of an answer")
    serve.add_argument("--api-key", default="", help="sent as a bearer token")
    serve.add_argument("--stages", action="store_true", help="ask an OmniStage server for its times per stage")
    offline = actions.add_parser("offline", help="the same load on an engine of this process")
    _model(offline)
    for each in (serve, offline):
        _load(each)
    comparison = actions.add_parser("compare", help="two results side by side")
    comparison.add_argument("before", metavar="BEFORE.json")
    comparison.add_argument("after", metavar="AFTER.json")


def _load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", choices=("chat", "chat-audio", "speech", "image", "video"), default="chat")
    parser.add_argument("--dataset", default="builtin", help="builtin, random, or a file with a prompt per line")
    parser.add_argument("--words", type=_positive, default=32, help="words of a random prompt")
    parser.add_argument("--requests", type=_positive, default=32)
    parser.add_argument("--concurrency", type=_positive, default=4, help="closed loop: clients")
    parser.add_argument("--rate", type=_rate, default=None, help="open loop: requests per second, Poisson")
    parser.add_argument("--percentiles", type=_percent, nargs="+", default=[50.0, 90.0, 99.0])
    parser.add_argument("--slo", action="append", default=[], metavar="METRIC=SECONDS", help="objective for goodput")
    parser.add_argument("--seed", type=int, default=0, help="of random prompts and arrivals")
    parser.add_argument("--extra-body", default="{}", metavar="JSON", help="merged into every request")
    parser.add_argument("--out", metavar="FILE", default=None, help="write the result as JSON")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return rate


def _percent(text: str) -> float:
    percent = float(text)
    if not 0 <= percent <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not within 0..100")
    return percent


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="built-in name, local folder or hub id")
    parser.add_argument("--deploy", metavar="FILE", default=None, help="deploy file (YAML)")
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override one value, e.g. stages.thinker.max_num_seqs=4; a bare stage key sets it for all stages",
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not within 0..65535")
    return port


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The `--set` values: JSON where they parse as such, else text. Raises OmniError for one without `=`."""
    overrides: dict[str, Any] = {}
    for setting in arguments.settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise OmniError(f"--set {setting!r}: write KEY=VALUE, for example --set dtype=float32")
        overrides[key] = _value(text)
    return overrides


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main())
