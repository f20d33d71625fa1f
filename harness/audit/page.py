"""One page for people to read: the worst prompts, both texts side by side, wrong tokens marked. Needs no other file."""

from collections.abc import Sequence
from html import escape as escaped

from harness.audit.records import AuditedOutput, Decision, SlimToken, worst_first
from harness.audit.tables import WORST, explanation, summary_frame, text_of
from harness.records import RunRecord
from harness.report.page import STYLE as BASE

STYLE = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(20em, 1fr)); gap: 1.5em; }
.pair > div { min-width: 0; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: 0.7em; }
.text { max-height: 30em; overflow-y: auto; } @media print { .text { max-height: none; } }
mark { background: #f6c3a5; } mark.regenerate { background: #f3a6c8; } .decided { border-bottom: 1px dotted #777; }
"""

CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
"""Control characters that no page may have, as the characters that stand for them."""


def escape(text: str) -> str:
    return escaped(text.translate(CONTROLS))


def page(run: RunRecord, outputs: Sequence[AuditedOutput], facts: Sequence[str]) -> str:
    """The whole page as HTML."""
    worst = worst_first(outputs)[:WORST]
    parts = [
        f"<h1>Audit of run {escape(run.run_id)}</h1>",
        f"<p>{escape(explanation(run))}</p>",
        "<p>Wrong: <mark>accepted draft</mark>, <mark class='regenerate'>token written by the slim verifier</mark>; "
        "<span class='decided'>other tokens that the slim verifier decided</span>. Point at a mark for numbers.</p>",
        f"<div class='wide'>{summary_frame(outputs).to_html(index=False, border=0)}</div>",
        f"<h2>{'The worst prompts' if worst else 'No token of the slim verifier is wrong'}</h2>",
        *(prompt(output) for output in worst),
        "<h2>Run</h2><ul>" + "".join(f"<li>{escape(fact)}</li>" for fact in facts) + "</ul>",
    ]
    head = f"<meta charset='utf-8'/><title>Audit of {escape(run.run_id)}</title><style>{BASE}{STYLE}</style>"
    return f"<!DOCTYPE html><html lang='en'><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def prompt(output: AuditedOutput) -> str:
    """One prompt: scores, references, the texts beside each other, and a line for each wrong token."""
    scores = f"{output.metric} {text_of(output.score, 1)}, baseline {text_of(output.baseline_score, 1)}"
    return (
        f"<h3>{escape(output.task)}, {escape(output.example_id)}, {escape(output.arm)}: {escape(scores)}; wrong "
        f"tokens: {len(output.wrong)}</h3>"
        f"<p dir='auto'>Reference: {escape(' | '.join(output.references)) or '(none)'}</p>"
        f"<div class='pair'>{column(output.arm, marked(output))}"
        f"{column('baseline', escape(output.baseline_text))}{gone_on(output)}</div>" + token_table(output)
    )


def column(head: str, text: str) -> str:
    """A text, which is HTML already, under its name; written from right to left where its letters are."""
    return f"<div><b>{escape(head)}</b><div class='text' dir='auto'>{text or '(no text)'}</div></div>"


def gone_on(output: AuditedOutput) -> str:
    """The text with the full verifier from the first wrong token on; nothing where that was not asked for."""
    if not output.continuations:
        return ""
    first = output.continuations[0]
    head = f"full verifier from output token {first.position + 1} on: {output.metric} {text_of(first.score, 1)}"
    return column(head, escape(first.text))


def marked(output: AuditedOutput) -> str:
    """The text with its wrong tokens marked, and what else the slim verifier decided underlined."""
    by_position = {token.position: token for token in output.tokens}
    found = []
    for position, piece in enumerate(output.pieces):
        token = by_position.get(position)
        if token is None:
            found.append(escape(piece))
        elif token.wrong:
            kind = "" if token.route is Decision.ACCEPT else " class='regenerate'"
            found.append(f"<mark{kind} title='{escape(said(token))}'>{escape(piece) or '&#9633;'}</mark>")
        else:
            found.append(f"<span class='decided'>{escape(piece)}</span>")
    return "".join(found)


def said(token: SlimToken) -> str:
    return (
        f"{token.route.value}: full verifier wants {token.wanted_text!r}, gap {token.gap:.2f} nats, "
        f"confidence {token.confidence:.2f}, output token {token.position + 1}"
    )


def token_table(output: AuditedOutput) -> str:
    goes_on = {one.position: one.score for one in output.continuations}
    effects = output.effects
    rows = "".join(
        f"<tr><td>{token.position + 1}</td><td>{token.route.value}</td><td>{escape(repr(token.text))}</td>"
        f"<td>{escape(repr(token.wanted_text))}</td><td>{token.gap:.2f}</td><td>{token.confidence:.2f}</td>"
        f"<td>{text_of(goes_on.get(token.position), 1)}</td><td>{text_of(effects.get(token.position), 1)}</td></tr>"
        for token in output.wrong
    )
    heads = (
        *("output token", "route", "written", "full verifier", "gap (nats)", "confidence"),
        *("score if the full verifier goes on here", "effect on the score"),
    )
    return f"<div class='wide'><table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table></div>"
