"""A bar chart as SVG text: groups of bars with a name under each group."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 70, 70
COLORS = ("#1f5fa8", "#d9822b", "#7a8b99", "#3d9970", "#a05195", "#c9b037", "#5c5c5c")


def _scale_top(most: float) -> float:
    """A round number not below the largest value."""
    step = 10.0 ** (len(str(int(most))) - 1) if most >= 1 else 0.1
    return max(step, -(-most // step) * step)


def grouped(
    title: str,
    unit: str,
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None]]],
) -> str:
    """One bar per series in each group; None leaves its place empty."""
    most = max((value for _, values in series for value in values if value), default=1.0)
    top = _scale_top(most)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    group_width = wide / max(len(groups), 1)
    bar_width = group_width * 0.8 / max(len(series), 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(6):
        value, y = top * tick / 5, TOP + high - high * tick / 5
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="12" y="{TOP - 10}">{escape(unit)}</text>')
    for index, (name, values) in enumerate(series):
        color = COLORS[index % len(COLORS)]
        x = LEFT + index * wide / max(len(series), 1)
        parts.append(f'<rect x="{x:.1f}" y="34" width="11" height="11" fill="{color}"/>')
        parts.append(f'<text x="{x + 15:.1f}" y="44" font-size="11">{escape(name)}</text>')
        for place, value in enumerate(values):
            if not value:
                continue
            left = LEFT + place * group_width + group_width * 0.1 + index * bar_width
            size = high * value / top
            parts.append(
                f'<rect x="{left:.1f}" y="{TOP + high - size:.1f}" width="{bar_width * 0.92:.1f}" '
                f'height="{size:.1f}" fill="{color}">'
                f"<title>{escape(name)}: {value:.3f}</title></rect>"
            )
    for place, name in enumerate(groups):
        x = LEFT + (place + 0.5) * group_width
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
