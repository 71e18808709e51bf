# SPDX-License-Identifier: Apache-2.0
"""The report for programs."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from openengine_conformance.exchange import Exchange, render
from openengine_conformance.requirements import REQUIREMENTS
from openengine_conformance.results import Report, Result, Verdict

FORMAT = 1
"""Grows when a field changes its meaning or goes."""


def to_json(report: Report) -> str:
    """Return the report as a JSON document."""
    return json.dumps(to_dict(report), indent=1, ensure_ascii=False) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain data."""
    standings = report.standings()
    return {
        "format": FORMAT,
        "target": report.target,
        "began": report.began.isoformat(),
        "seconds": round(report.seconds, 3),
        "versions": {
            "suite": report.suite_version,
            "schema_revision": 1,
            "python": platform.python_version(),
            "grpcio": metadata.version("grpcio"),
            "protobuf": metadata.version("protobuf"),
        },
        "server": {
            "model": report.offer.model,
            "engine_info": _message(report.offer.engine),
            "model_info": _message(report.offer.info),
        },
        "totals": {"passed": report.passed, "failed": report.failed, "skipped": report.skipped},
        "server_stopped": report.death,
        "requirements": {
            rule: {
                "standing": standings[rule],
                "summary": requirement.summary,
                "section": requirement.section,
                **({"unseen": requirement.unseen} if requirement.unseen else {}),
            }
            for rule, requirement in REQUIREMENTS.items()
        },
        "cases": [_case(result) for result in report.results],
    }


def _case(result: Result) -> dict[str, Any]:
    data: dict[str, Any] = {
        "id": result.case.id,
        "requires": result.case.requires,
        "rules": list(result.case.rules),
        "profile": result.case.profile,
        "verdict": result.verdict,
        "seconds": round(result.seconds, 3),
        "runs": result.runs,
    }
    if result.reason:
        data["reason"] = result.reason
    if result.notes:
        data["notes"] = result.notes
    if result.verdict in (Verdict.FAILED, Verdict.KNOWN_FAILURE):
        data["broken_rule"] = result.rule
        data["failed_runs"] = result.failed_runs
        data["exchanges"] = [_exchange(exchange) for exchange in result.exchanges]
    else:
        data["exchanges"] = [exchange.summary() for exchange in result.exchanges]
    return data


def _exchange(exchange: Exchange) -> dict[str, Any]:
    return {
        "method": exchange.method,
        "request": render(exchange.request),
        "replies": [
            {"number": reply.number + 1, "at": round(reply.at, 4), "message": render(reply.message)}
            for reply in exchange.replies
        ],
        "reply_count": exchange.count,
        "status": exchange.status,
    }


def _message(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return data
