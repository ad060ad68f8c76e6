"""report: measurements of a rehearsal, and their presentation.

rehearsal     `Rehearsal`, the plain data of one run; saved as JSON, checked by rehearsal.schema.json
documents     dataclasses as JSON documents: reading with checks, writing, schemas
measurement   the listener that measures: categories, phases, modules, lines, the peak, work
places        where the program is: module paths, phases, steps, lines of the user's code
borrowed_state  real modules and optimizers that work on stand-ins for a while
summary       a `Rehearsal` from a measurement: what was alive at the peak, tables, verdict
sanity        what a verdict rests on, and whether anything was computed at all
text          a `Rehearsal` as text: the verdict, then tables
runs          `rehearse`: a function, run once on stand-ins and measured
isolation     what the outside of a sandbox adds: files that were written, what was in force
times         the time of a step as text
script_facts  what the runner of a script knows of it
cluster_rehearsal  `ClusterRehearsal`, the plain data of a program on several cards
cluster_runs  `rehearse_cluster`: all ranks of a program, run on stand-ins and measured
cluster_times  the time of a step of all ranks together, from their logs
cluster_comparison  two of them: ranks whose memory changed, what is communicated more
cluster_page  a `ClusterRehearsal` as one HTML file: heat map, stages, communication, the pages of ranks
cluster_trace  a `ClusterRehearsal` as a Chrome trace with a process for each rank
cluster_text  a `ClusterRehearsal` as text
page          one HTML file: verdict, memory over time, flame graph of the peak, tables
exports       files for other tools: Perfetto, speedscope, folded stacks, torch's memory snapshot
comparison    two rehearsals side by side: what grew, and a table in Markdown
"""
