"""The command line: one entry point, one module per command, loaded when it is asked for.

Exit codes, the same for every command:

* 0: the answer is yes (every byte right, every case passed, everything certified);
* 1: the answer is no, and the output says why;
* 2: the question was wrong; the message names the option, its value, the rule and what to write;
* 3: this machine cannot do it, and the message says what it lacks (memory, a GPU, permission);
* 130: interrupted.

A traceback is a defect of this file: ``vkvmap --debug`` shows one on purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from vkvmap._version import __version__
from vkvmap.cli.group import Group
from vkvmap.cli.output import EXIT_CANNOT, EXIT_NO, EXIT_WRONG, fail
from vkvmap.errors import RegionError, SpecError, VkvmapError

#: Command -> (module of this package, one line for the overview), in the order of first use.
COMMANDS = {
    "roundtrip": ("roundtrip", "Move a model's KV cache between two configurations and check it."),
    "explain": ("explain", "Say what a move costs and why, layer group by layer group."),
    "show": ("show", "Draw which rank holds which byte of a page."),
    "mapping": ("mapping", "Print the mapping of one page on one rank."),
    "conformance": ("conformance", "Check this implementation against a file of cases."),
    "models": ("models", "List the model presets."),
    "identity": ("identity", "Print what a deployment stores its pages under."),
    "verify": ("verify", "Will two engines understand each other's pages?"),
    "store": ("store", "Look into, check and trim a store of pages."),
    "convert": ("convert", "Page files of ranks to a store, and back."),
    "bench": ("bench", "Measure this machine."),
    "info": ("info", "What a bug report needs: build, devices, limits, calibration."),
}


class Overview(Group):
    """Commands from `COMMANDS`, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        command: click.Command = import_module(f"vkvmap.cli.{module}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    cls=Overview,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 yes, 1 no, 2 wrong usage, 3 this machine cannot, 130 interrupted.",
)
@click.version_option(__version__, "--version", "-V", prog_name="vkvmap")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
@click.pass_context
def app(ctx: click.Context, debug: bool) -> None:
    """KV-cache pages without their parallelism: store under one configuration, load under another.

    \b
    vkvmap roundtrip llama-3-8b --from tp=4 --to tp=2
    vkvmap explain deepseek-v3 --from tp=8 --to tp=16,dcp=2
    """
    ctx.obj = {"debug": debug}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with `argv` (default: the process's); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        code = app.main(arguments, prog_name="vkvmap", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except click.exceptions.Abort:
        return fail("interrupted", 130, as_json)
    except KeyboardInterrupt:
        return fail("interrupted", 130, as_json)
    except click.UsageError as error:
        return _usage(error, as_json)
    except click.ClickException as error:
        return fail(error.format_message(), EXIT_WRONG, as_json)
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_NO
    except Exception as error:
        if "--debug" in arguments:
            raise
        return _explained(error, as_json)


def _usage(error: click.UsageError, as_json: bool) -> int:
    message = error.format_message()
    details: dict[str, str] = {}
    parameter = getattr(error, "param", None)
    if parameter is not None:
        details["option"] = parameter.opts[0]
    if isinstance(error, click.MissingParameter) and isinstance(parameter, click.Option):
        message = f"{message.rstrip('.')}: {parameter.help}"
    if error.ctx is not None and not as_json:
        message += f"\nSee: {error.ctx.command_path} --help"
    return fail(message, EXIT_WRONG, as_json, **details)


def _explained(error: Exception, as_json: bool) -> int:
    """Exit codes of errors that carry their own explanation; anything else is a defect of ours."""
    if isinstance(error, SpecError):
        return fail(str(error), EXIT_WRONG, as_json)
    if isinstance(error, (RegionError, MemoryError)):
        return fail(str(error) or "out of memory", EXIT_CANNOT, as_json)
    if isinstance(error, VkvmapError):
        return fail(str(error), EXIT_NO, as_json)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{error.strerror or error}", EXIT_CANNOT, as_json)
    return fail(
        f"internal error ({type(error).__name__}: {error}); run `vkvmap --debug ...` for the "
        "traceback and please report it with the output of `vkvmap info`",
        EXIT_CANNOT,
        as_json,
    )
