"""The look of every plot: colors that people with color-blindness tell apart.

The palette is Okabe and Ito's ("Color Universal Design", 2008), without its yellow, which is
too light on white.
"""

from cycler import cycler

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")

# For `matplotlib.rc_context`. The salt makes the ids of an SVG those of the drawing before.
PLOT_STYLE = {"axes.prop_cycle": cycler(color=PALETTE), "svg.hashsalt": "sgl_pipeline"}
