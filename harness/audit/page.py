"""One page for people to read: the worst prompts, both texts side by side, wrong tokens marked. Needs no other file."""

from collections.abc import Sequence
from html import escape

from harness.audit.records import AuditedOutput, SlimToken, worst_first
from harness.audit.tables import WORST, explanation, summary_frame, text_of
from harness.records import Route, RunRecord

STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25em 0.7em; text-align: left; vertical-align: top; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1.5em; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: 0.7em; }
mark { background: #f6c3a5; } mark.regenerate { background: #f3a6c8; } .decided { border-bottom: 1px dotted #777; }
"""


def page(run: RunRecord, outputs: Sequence[AuditedOutput], facts: Sequence[str]) -> str:
    """The whole page as HTML."""
    worst = worst_first(outputs)[:WORST]
    parts = [
        f"<h1>Audit of run {escape(run.run_id)}</h1>",
        f"<p>{escape(explanation(run))}</p>",
        "<p><mark>accepted draft</mark> and <mark class='regenerate'>regenerated token</mark> that are wrong; "
        "<span class='decided'>other tokens that the slim verifier decided</span>. Point at a mark for numbers.</p>",
        summary_frame(outputs).to_html(index=False, border=0),
        f"<h2>{'The worst prompts' if worst else 'No token of the slim verifier is wrong'}</h2>",
        *(prompt(output) for output in worst),
        "<h2>Run</h2><ul>" + "".join(f"<li>{escape(fact)}</li>" for fact in facts) + "</ul>",
    ]
    head = f"<meta charset='utf-8'><title>Audit of {escape(run.run_id)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def prompt(output: AuditedOutput) -> str:
    """One prompt: scores, references, both texts, and a line for each wrong token."""
    scores = f"{output.metric} {text_of(output.score, 1)}, baseline {text_of(output.baseline_score, 1)}"
    return (
        f"<h3>{escape(output.task)}, {escape(output.example_id)}, {escape(output.arm)}: {escape(scores)}; "
        f"{len(output.wrong)} wrong tokens</h3>"
        f"<p>Reference: {escape(' | '.join(output.references))}</p>"
        f"<div class='pair'><div><b>{escape(output.arm)}</b><div class='text'>{marked(output)}</div></div>"
        f"<div><b>baseline</b><div class='text'>{escape(output.baseline_text)}</div></div></div>" + token_table(output)
    )


def marked(output: AuditedOutput) -> str:
    """The text with its wrong tokens marked, and what else the slim verifier decided underlined."""
    by_position = {token.position: token for token in output.tokens}
    found = []
    for position, piece in enumerate(output.pieces):
        token = by_position.get(position)
        if token is None:
            found.append(escape(piece))
        elif token.wrong:
            kind = " class='regenerate'" if token.route is Route.REGENERATE else ""
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
    rows = "".join(
        f"<tr><td>{token.position + 1}</td><td>{token.route.value}</td><td>{escape(repr(token.text))}</td>"
        f"<td>{escape(repr(token.wanted_text))}</td><td>{token.gap:.2f}</td><td>{token.confidence:.2f}</td></tr>"
        for token in output.wrong
    )
    heads = ("output token", "route", "written", "full verifier", "gap (nats)", "confidence")
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"
