"""The compiler: prices every placement of a graph on a profiled machine and picks the fastest.

From the bottom: `workload` (what is asked), `op_cost` (what an op costs in FLOPs and bytes), `cost`
(the roofline), `placement`, `memory` and `budget` (what goes where and what it takes), `pricing`
and `prefill` (seconds of a candidate), `candidate`, `search`, `advice` (what would help) and
`planning` (a user's request, answered). Executes nothing and never imports the native runtime.
"""
