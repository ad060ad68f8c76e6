"""report: what a run needed, for people and for other tools.

    page        one HTML file: verdict, memory over time, flame graph of the peak, tables
    exports     files for other tools: Perfetto, speedscope, folded stacks
    comparison  two rehearsals side by side, with a verdict and a table in Markdown
"""
