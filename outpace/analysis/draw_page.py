"""The passes of an answer as a page: one tree at a time, and the text that they made.

The page holds everything that it needs. Without scripts it shows all trees below each other.
"""

from __future__ import annotations

from html import escape

from outpace.analysis.draw_tree import STYLE, caption, legend, subtitle, tree
from outpace.analysis.picture import Trace


def html(trace: Trace) -> str:
    """A page that shows one pass at a time; without scripts it shows all of them."""
    text, sections = [f'<span class="given">{escape(trace.prompt)}</span>'], []
    text.append(f'<mark class="added" title="from the prompt\'s pass">{escape(trace.first)}</mark>')
    for number, picture in enumerate(trace.passes, start=1):
        pieces = list(picture.emitted)
        own = "" if picture.added is None else f'<mark class="added">{escape(pieces.pop())}</mark>'
        marks = "".join(f'<mark class="accepted">{escape(piece)}</mark>' for piece in pieces)
        text.append(f'<a href="#pass{number}" class="emitted">{marks}{own}</a>')
        body, width, height = tree(picture, number)
        sections.append(
            f'<section id="pass{number}"><svg width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" '
            f'aria-label="Pass {number}: {escape(caption(picture))}">{body}</svg></section>'
        )
    title, method, (signs, long) = escape(trace.model), escape(trace.drafter), legend()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}, {method}</title><style>{STYLE}{PAGE}</style></head><body>\n"
        f"<h1>{title} <code>{method}</code></h1><p>{escape(subtitle(trace))}</p>\n"
        f'<svg width="{long:g}" height="24" role="img" aria-label="Legend">{signs}</svg>\n'
        f'<pre class="text">{"".join(text)}</pre>\n'
        '<nav hidden><button id="back" aria-label="Pass before">\u2190</button>'
        f'<input id="at" type="range" min="1" max="{max(1, len(trace.passes))}" value="1" '
        'aria-label="Pass"><button id="on" aria-label="Next pass">\u2192</button>'
        "<output></output></nav>\n"
        f"<main>{''.join(sections)}</main>\n<script>{SCRIPT}</script></body></html>\n"
    )


PAGE = (
    ":root{color-scheme:light dark}"
    "body{max-width:1200px;margin:2rem auto;padding:0 1.2rem;background:#fff;color:#1f2328;"
    'font:15px/1.5 system-ui,"Segoe UI",Roboto,Helvetica,Arial,"DejaVu Sans",sans-serif}'
    "h1{font-size:1.3rem;margin:0;overflow-wrap:anywhere}h1 code{font-size:.95rem;font-weight:400;"
    "margin-left:.4rem}"
    "p{margin:.2rem 0 1rem;color:#57606a}"
    ".text{white-space:pre-wrap;overflow-wrap:anywhere;max-height:16rem;overflow:auto;"
    "padding:.9rem 1.1rem;border:1px solid #d0d7de;border-radius:10px;background:#f6f8fa;"
    "font:13px/1.7 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    ".given{color:#6e7781}.emitted{text-decoration:none;color:inherit;border-radius:5px}"
    "mark{background:none;color:inherit;border-radius:4px;padding:1px 0}"
    "mark.accepted{background:#d3f0dc;color:#0f5323}mark.added{background:#ffe9b3;color:#6f4400}"
    ".emitted.now{outline:2px solid #0969da;outline-offset:1px}"
    "nav{display:flex;gap:.7rem;align-items:center;margin:1rem 0;position:sticky;top:.5rem}"
    "nav[hidden]{display:none}nav input{flex:1;max-width:24rem}"
    "button{font:inherit;padding:.15rem .9rem;border:1px solid #d0d7de;border-radius:8px;"
    "background:#f6f8fa;color:inherit;cursor:pointer}button:disabled{opacity:.4;cursor:default}"
    "section{overflow-x:auto;margin:0 0 1.5rem}section[hidden]{display:none}"
    "@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}p{color:#9ea7b3}"
    ".text,button{background:#161b22;border-color:#30363d}.given{color:#8b949e}"
    "mark.accepted{background:#12351f;color:#9be9b4}mark.added{background:#3a2b10;color:#f2cc80}"
    ".emitted.now{outline-color:#58a6ff}}"
)

SCRIPT = (
    "const all=[...document.querySelectorAll('section')],links=[...document.querySelectorAll("
    "'a.emitted')],at=document.getElementById('at'),out=document.querySelector('output'),"
    "back=document.getElementById('back'),on=document.getElementById('on');"
    "function show(n){n=Math.min(all.length,Math.max(1,n));at.value=n;"
    "all.forEach((s,i)=>s.hidden=i!==n-1);links.forEach((a,i)=>a.classList.toggle('now',i===n-1));"
    "back.disabled=n===1;on.disabled=n===all.length;out.textContent='pass '+n+' of '+all.length;}"
    "if(all.length){document.querySelector('nav').hidden=false;"
    "at.oninput=()=>show(+at.value);back.onclick=()=>show(+at.value-1);"
    "on.onclick=()=>show(+at.value+1);"
    "links.forEach((a,i)=>a.onclick=e=>{e.preventDefault();show(i+1)});"
    "addEventListener('keydown',e=>{if(e.target===at)return;"
    "if(e.key==='ArrowLeft')show(+at.value-1);if(e.key==='ArrowRight')show(+at.value+1)});"
    "show(1)}"
)
"""Shows one pass at a time; arrow keys, buttons, the slider and the text lead to the others."""
