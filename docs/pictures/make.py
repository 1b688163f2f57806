"""Draws the pictures: `python docs/pictures/make.py` writes the .svg files of this folder."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
COLOURS = {
    "cpu": "#f2c57c", "accelerator": "#8fb8de", "link": "#b7d7a8", "wait": "#eeeeee",
    "weights": "#f2c57c", "kv": "#8fb8de", "activations": "#b7d7a8", "workspace": "#d5b8e8",
    "staging": "#f4b6b6", "reserve": "#eeeeee",
}  # fmt: skip
FONT = "font-family='sans-serif' font-size='12' fill='#222'"


def box(x: float, y: float, width: float, height: float, kind: str, text: str) -> str:
    """A coloured box with its text in the middle."""
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='{COLOURS[kind]}' "
        f"stroke='#555'/><text x='{x + width / 2}' y='{y + height / 2 + 5}' {FONT} "
        f"text-anchor='middle'>{text}</text>"
    )


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    """A line of text."""
    return f"<text x='{x}' y='{y}' {FONT} text-anchor='{anchor}'>{text}</text>"


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole SVG on white, so that it can be read on a dark page, too."""
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"height='{height}' role='img'><title>{title}</title>\n"
        f"<rect width='{width}' height='{height}' fill='white'/>\n{body}\n</svg>\n"
    )


def two_devices() -> str:
    """One decode step alone, then two groups that take turns."""
    parts = [label(10, 22, "One group, two steps: the devices wait for one another")]
    rows = {"CPU": 38, "link": 74, "accelerator": 110}
    parts += [label(10, y + 20, name) for name, y in rows.items()]
    for step in range(2):
        x = 110 + 320 * step
        parts += [
            box(x, rows["CPU"], 120, 28, "cpu", "layers 0-17"),
            box(x + 120, rows["link"], 30, 28, "link", "x"),
            box(x + 150, rows["accelerator"], 110, 28, "accelerator", "layers 18-35"),
            box(x + 260, rows["link"], 30, 28, "link", "x"),
            box(x + 290, rows["CPU"], 30, 28, "cpu", "head"),
        ]
    parts.append(label(10, 172, "Two groups, a and b: both devices work at once"))
    rows = {"CPU": 188, "link": 224, "accelerator": 260}
    parts += [label(10, y + 20, name) for name, y in rows.items()]
    for turn in range(4):
        x, group = 110 + 150 * turn, "ab"[turn % 2]
        parts.append(box(x, rows["CPU"], 120, 28, "cpu", f"{group}: layers 0-17"))
        if turn >= 2:
            parts.append(box(x - 30, rows["CPU"], 30, 28, "cpu", "head"))
        parts.append(box(x + 120, rows["link"], 14, 28, "link", ""))
        if turn < 3:
            parts.append(
                box(x + 134, rows["accelerator"], 106, 28, "accelerator", f"{group}: 18-35")
            )
            parts.append(box(x + 240, rows["link"], 14, 28, "link", ""))
    parts.append(label(760, 320, "time &#8594;", "end"))
    return picture(770, 335, "A decode step on two devices", parts)


def memory_stack() -> str:
    """The purposes of a device's memory, from the bottom."""
    stacks = {
        "CPU (host memory)": [
            ("weights", 84, "weights: slices on the CPU"),
            ("kv", 60, "KV pages, far blocks included"),
            ("activations", 26, "activations: values of a step"),
            ("workspace", 30, "workspace: scratch of each thread"),
            ("staging", 30, "staging: page-locked copies"),
            ("reserve", 34, "reserve: left untouched"),
        ],
        "accelerator": [
            ("weights", 104, "weights: slices on the accelerator"),
            ("kv", 62, "KV pages: near blocks"),
            ("activations", 26, "activations"),
            ("workspace", 26, "workspace"),
            ("staging", 30, "staging: visiting weights, pages"),
            ("reserve", 34, "reserve: driver, fragmentation"),
        ],
    }
    parts: list[str] = []
    for column, (name, items) in enumerate(stacks.items()):
        x, y = 30 + 370 * column, 340
        for kind, height, text in items:
            y -= height
            parts.append(box(x, y, 330, height, kind, text))
        parts.append(label(x, 362, name))
        top, bottom = y + items[-1][1], 340
        parts.append(f"<path d='M{x - 8} {top} V{bottom}' stroke='#c00' stroke-width='3'/>")
        parts.append(label(x, y - 10, "what was free when the plan was made"))
    parts.append(label(30, 386, "red: total_bytes, which the plan takes"))
    return picture(740, 400, "Memory of a device by purpose", parts)


def main() -> None:
    (HERE / "two-devices.svg").write_text(two_devices(), encoding="utf-8")
    (HERE / "memory-stack.svg").write_text(memory_stack(), encoding="utf-8")


if __name__ == "__main__":
    main()
