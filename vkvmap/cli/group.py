"""Groups of commands: nothing given prints the help, a mistyped command gets the nearest."""

from __future__ import annotations

import click

from vkvmap.cli.output import EXIT_WRONG
from vkvmap.nearest import nearest


class Group(click.Group):
    """A `click.Group` that answers alike under every release of click."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(EXIT_WRONG)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        known = self.list_commands(ctx)
        if name and name not in known and not name.startswith("-"):
            close = nearest(name, known)
            hint = f" Did you mean {close!r}?" if close else f" Commands: {', '.join(known)}."
            raise click.UsageError(f"no command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)
