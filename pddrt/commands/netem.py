"""`pddrt netem`: the emulated link by itself. The commands are in files of their own."""

from __future__ import annotations

import typer

from pddrt.commands import check as check_cli
from pddrt.commands import predict as predict_cli
from pddrt.commands import profile as profile_cli
from pddrt.commands import proxy as proxy_cli

app = typer.Typer(help="The emulated link by itself.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def netem() -> None:
    pass


app.command(short_help="The link as a TCP proxy for any program.")(proxy_cli.proxy)
app.command(short_help="Whether this machine keeps the link: measured against prediction.")(
    check_cli.check
)
app.command(short_help="Virtual transfers over a link: when is each done?")(predict_cli.predict)
app.command(short_help="What a named WAN, profile or trace is; makes one from measurements.")(
    profile_cli.profile
)
