"""The command line: read targets and options, call the engine, print what came back.

Nothing here imports torch before a command runs, so that `--help` answers at once.
Exit codes: 0 fine, 1 a failed check or failed work, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from tilewright import __version__
from tilewright.cli.bench import bench
from tilewright.cli.compare import compare
from tilewright.cli.doctor import doctor
from tilewright.cli.explain import explain
from tilewright.cli.listing import list_
from tilewright.cli.options import InOrder
from tilewright.cli.records import records
from tilewright.cli.summary import summary
from tilewright.cli.tune import INTERRUPTED, tune
from tilewright.cli.verify import verify
from tilewright.errors import TilewrightError


@click.group(
    cls=InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="tilewright")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """PyTorch operators as fast as the machine allows: tune them, check them, measure them.

    A workload is written as "layer_norm(x=f16[8192,5140], weight=f16[5140], bias=f16[5140])".
    """


for command in (doctor, list_, tune, bench, verify, explain, records, summary, compare):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors become one message on stderr."""
    args = sys.argv[1:] if args is None else list(args)
    for stream in (sys.stdout, sys.stderr):  # what a locale has no sign for costs no result
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = cli.main(args=list(args), prog_name="tilewright", standalone_mode=False)
        if sys.stdout is not None:  # whoever started it closed it
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except TilewrightError as error:
        if args[:1] == ["--debug"]:
            traceback.print_exc()
        click.echo(f"{type(error).__name__}: {error}", err=True)
        return error.exit_code
    except OSError as error:
        if _takes_output():
            raise
        click.echo(
            f"cannot write to standard output: {error.strerror}; send it elsewhere", err=True
        )
        return 1


def _takes_output() -> bool:
    """Whether standard output can be written, by trying: an error does not tell of which file it
    is. If not, what is left to print is dropped, which Python would try again when it ends."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
