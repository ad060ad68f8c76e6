"""report: what a rehearsal has measured, and how it is shown.

    rehearsal     `Rehearsal`, the plain data of one run; saved as JSON, checked by rehearsal.schema.json
    measurement   the listener that measures: categories, phases, modules, lines, the peak, work
    host_numbers  Python numbers that eager makes tensors of
    places        where the program is: module paths, phases, steps, lines of the user's code
    borrowed_state  real modules and optimizers that work on stand-ins for a while
    summary       a `Rehearsal` from a measurement: what was alive at the peak, tables, verdict
    text          a `Rehearsal` as text: the verdict, then tables
    runs          `rehearse`: a function, run once on stand-ins and measured
    page          one HTML file: verdict, memory over time, flame graph of the peak, tables
    exports       files for other tools: Perfetto, speedscope, folded stacks, torch's memory snapshot
    comparison    two rehearsals side by side: what grew, and a table in Markdown
"""
