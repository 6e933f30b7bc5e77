"""The local supervisor: runs a stack on this machine, and only on this machine.

Three layers, each of which knows only the ones before it:

* `plan` turns a stack into the child processes to run (pure: no process, no file).
* `supervisor` keeps those children alive and writes down how they fare (`runfile`).
* `updown` is what `sumibi up` and `sumibi down` do: start the supervisor in the background, follow it
  until everything is ready, stop it.

Rules: every child has one owner that reaps it; no child outlives its supervisor, even one that was
killed; a lock that the kernel frees says whether a stack runs, never a file that may be stale.
"""
