"""The arguments that the benchmarks of whole workloads share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import product_parts as parts

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("BATCHKV_DATA", ROOT.parent / "shared" / "data"))


def parser_of(doc: str) -> argparse.ArgumentParser:
    """Model, rows and repeats; the help begins with the first line of ``doc``."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--shape", choices=list(parts.SHAPES), default="tiny")
    add_folders(parser)
    parser.add_argument("--per-group", type=int, help="rows behind shared examples [40]")
    parser.add_argument("--groups", type=int, help=f"of such rows [{parts.GROUPS}]")
    parser.add_argument("--data", type=Path, default=DATA, help="where gsm8k_8shot.jsonl lies")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few rows, once")
    return parser


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Folders that stay, so that a later benchmark need not make and measure all again."""
    parser.add_argument("--models", type=Path, help="where model folders stay; else they go")
    parser.add_argument(
        "--kept", type=Path, help="a home: its measurements and kernels are used, and stay"
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """What benchmarks with real workers have besides."""

    def setting(text: str) -> tuple[str, str]:
        name, _, value = text.partition("=")
        return name, value

    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--devices", metavar="0,1", help="a GPU for each worker, by turns")
    parser.add_argument("--seconds-limit", type=float, default=86_400.0, help="end by then")
    parser.add_argument("--out", "--json", type=Path, help="numbers, after each measurement")


def parsed(
    parser: argparse.ArgumentParser, rows: int | None, quick_rows: int
) -> argparse.Namespace:
    """What was given. ``rows`` are those of the file, where nothing is said."""
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats is 1 or more")
    if args.quick:
        args.groups, args.per_group = args.groups or 3, args.per_group or 4
        args.repeats = 1
    args.groups, args.per_group = args.groups or parts.GROUPS, args.per_group or 40
    args.rows = args.rows or (quick_rows if args.quick else rows)
    return args


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """The variables that ``--set`` names."""
    return {f"BATCHKV_{name.upper().replace('-', '_')}": value for name, value in args.set}


def environment_of(settings: dict[str, str]) -> dict[str, str]:
    """This process's, with no settings of batchkv but these."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BATCHKV_")}
    return kept | settings
