"""A process of its own for every notebook that `nbdev_test` runs (pyproject.toml names this as its `test_setup`).

Chapters add methods to the classes of earlier chapters. In a process that runs one notebook after another, the second
would meet what the first one's cells have put there instead of what the package exports.
"""
from multiprocessing import connection, get_context

import nbdev.test


def isolate(
    cells, # all cells that are going to run; not needed
):
    "Have nbdev run its notebooks with `each_alone`"
    nbdev.test.parallel = each_alone


def each_alone(
    f,           # what to do with an item
    items,       # notebooks
    n_workers=0, # how many at a time
    pause=0, method=None, # fastcore's, of no use here
    **kwargs     # for `f`
)->list:         # of what `f` returned; (False, 0) if its process died
    "Like fastcore's `parallel`, with a new process for every item"
    context, todo, running, results = get_context("fork"), list(enumerate(items)), {}, {}
    while todo or running:
        while todo and len(running) < max(n_workers, 1):
            (i, item), (here, there) = todo.pop(0), context.Pipe(duplex=False)
            process = context.Process(target=lambda: there.send(f(item, **kwargs)))
            process.start()
            there.close()
            running[here] = i, process
        for here in connection.wait(list(running)):
            i, process = running.pop(here)
            try: results[i] = here.recv()
            except EOFError: results[i] = False, 0.
            process.join()
    return [results[i] for i in range(len(results))]
