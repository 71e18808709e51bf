"""The options are documented: one row each, and no row for what is not there."""

from __future__ import annotations

import argparse
import re

from openengine_adapters.options import add_server_options
from tests.support.server import REPOSITORY


def test_the_table_of_options_is_complete() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_server_options(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    text = (REPOSITORY / "docs" / "operating.md").read_text(encoding="utf-8")
    table = text.split("## Options")[1].split("\n## ")[0]
    rows = {
        name
        for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
        for name in re.findall(r"--[a-z][\w-]*", row)
    }
    assert {option for option in options if not option.startswith("--no-")} == rows
