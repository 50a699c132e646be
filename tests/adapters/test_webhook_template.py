"""Webhook prompts: what a template shows of an event, and that it stays mere text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.adapters.webhook.filters import WebhookEvent
from hermes_trio.adapters.webhook.template import render_extra, render_prompt
from hermes_trio.messaging.command_text import LiteralText, parse_command

EVENT = WebhookEvent(
    "gh",
    "issues",
    {
        "action": "opened",
        "issue": {"title": "Crash", "number": 7, "open": True, "labels": ["a", "b"]},
        "none": None,
        "sly": "{action} and {__raw__}",
    },
    {},
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{event_type}: {action} #{issue.number}", "issues: opened #7"),
        ("{issue.open} {none}", "True None"),
        ("{issue.labels}", '[\n  "a",\n  "b"\n]'),
        ("{issue.labels.0}", "{issue.labels.0}"),
        ("{missing} {issue.missing} {action.x}", "{missing} {issue.missing} {action.x}"),
        ("{ action } {{action}} {a-b}", "{ action } {opened} {a-b}"),
        ("{sly}", "{action} and {__raw__}"),
        ("no placeholder", "no placeholder"),
    ],
)
def test_placeholders(template: str, text: str) -> None:
    """Dotted paths step through objects; what is missing stays visible; values are not expanded again."""
    assert LiteralText(text) == render_prompt(template, EVENT)


def test_large_values_are_cut() -> None:
    """A structure is cut at 2000 characters and the whole payload at 4000."""
    event = WebhookEvent("r", "e", {"big": ["x" * 50] * 500}, {})
    assert len(render_prompt("{big}", event).text) == 2000
    assert len(render_prompt("{__raw__}", event).text) == 4000


def test_an_empty_template_shows_the_payload() -> None:
    """Without a template the prompt names the route and the event and shows the payload."""
    text = render_prompt("  ", EVENT).text
    assert text.startswith("The webhook route 'gh' received the event 'issues'. Its payload:\n\n{\n")
    assert '"title": "Crash"' in text


def test_delivery_settings_are_rendered_too() -> None:
    """Texts in the delivery settings are templates; empty texts and other values stay."""
    extra = {"repo": "o/r", "pr_number": "{issue.number}", "thread": "", "n": 5, "list": ["{action}"]}
    assert render_extra(extra, EVENT) == {"repo": "o/r", "pr_number": "7", "thread": "", "n": 5, "list": ["{action}"]}


@given(st.text())
def test_a_rendered_prompt_is_never_a_command(value: str) -> None:
    """SC-31: whatever the sender puts in front, the text is literal."""
    prompt = render_prompt("{x}", WebhookEvent("r", "e", {"x": "/" + value}, {}))
    assert prompt == LiteralText("/" + value)
    assert parse_command(prompt) is None
