"""The compiler: prices every placement of a graph on a profiled machine and picks the fastest.

From the bottom: `problem` (the limits to keep to), `counts` (what an op costs in FLOPs and bytes),
`times` (the roofline), `placement`, `memory` and `budget` (what goes where and what it takes),
`decode` and `prefill` (seconds of a candidate), `candidate`, `cut` (layers on two devices),
`search`, `advice` (what would help), `solve` (a user's request, answered), `steps` (one plan's
tasks in time). Executes nothing and never imports the native runtime.
"""
