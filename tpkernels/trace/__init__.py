"""Where the time of our ops goes, rank by rank: computing, communicating, waiting.

    with tpkernels.trace.record("step.html"):         # on every rank
        loss = model(x).square().mean(); loss.backward()

writes ``step.html`` (a page to look at), ``step.perfetto.json`` (for ui.perfetto.dev) and
``step.summary.json`` (its schema is ``summary.schema.json``, beside this file). ``tpkernels trace
-- python script.py`` does the same around a whole script.
"""

from tpkernels.trace.session import record as record

__all__ = ["record"]
