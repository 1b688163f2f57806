"""Layers and a head that two devices share. From the bottom: `shares` (what of a unit can be
shared), `units` (a graph, cut), `ways` (every way to cut it at once, and how layers are laid out),
`memory` (what a layout takes), `price` (how long its steps take), `search` (the best of all)."""
