"""The look of all pictures: an arm's colour and label, seeds as thin lines, their mean thick."""
import io
import math
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from train import RunError

# The colours of Okabe and Ito, which the colour-blind can tell apart.
COLOURS = {'default': '#777777', 'qk-svd': '#e69f00', 'qk-opt': '#d55e00', 'mask': '#0072b2',
           'mimetic': '#009e73', 'impulse': '#cc79a7', 'alibi': '#7b3fa0'}
# What a label says beside its arm: how the line is drawn, and the words for it.
VARIANTS = {
    '': ('-', ''),
    'mimetic-v': ('--', 'V of mimetic'),
    'shared': (':', 'one for all heads'),
    'learned': (':', 'learned positions'),
    'no-positions': ('--', 'no positions'),
}
STYLE = {'font.size': 8.5, 'axes.titlesize': 9, 'axes.labelsize': 8.5, 'xtick.labelsize': 8,
         'ytick.labelsize': 8, 'legend.fontsize': 8.5, 'axes.spines.top': False,
         'axes.spines.right': False, 'legend.frameon': False, 'axes.linewidth': 0.6}


def split_label(label):
    """mask-freeze-qk -> mask, freeze-qk; no-positions-mask -> mask, no-positions."""
    for arm in COLOURS:
        if label == arm:
            return arm, ''
        if label.startswith(f'{arm}-'):
            return arm, label.removeprefix(f'{arm}-')
        if label.endswith(f'-{arm}'):
            return arm, label.removesuffix(f'-{arm}')
    return label, ''


def look(label):
    """How a line is drawn: its colour by the arm, its style by what else the label says."""
    arm, variant = split_label(label)
    line, words = VARIANTS.get(variant, ('-.', variant.replace('-', ' ')))
    return dict(color=COLOURS.get(arm, 'black'), linestyle=line,
                label=f'{arm}, {words}' if words else arm)


def new_figure(height):
    """A figure as wide as a column of a README, 8 inches; one line where there is no matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError('a picture needs matplotlib: pip install matplotlib') from None
    except ValueError as error:
        # MPLBACKEND, or a matplotlibrc.
        raise RunError(f'matplotlib does not start: {error}') from None
    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(8, height), layout='constrained')


def save(figure, path, colours=None):
    """Writes a PNG. `colours`, how many it is reduced to: 256 more than halve its size, but show in
    a picture with maps of several colours."""
    from PIL import Image
    pixels = io.BytesIO()
    figure.savefig(pixels, format='png', dpi=110)
    image = Image.open(pixels).convert('RGB')
    if colours:
        image = image.quantize(colours, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    train.write(path, lambda temporary: image.save(temporary, format='png', optimize=True))


def line_of(label, style='-', colour='black', **kwargs):
    """A line for a legend."""
    from matplotlib.lines import Line2D
    return Line2D([], [], linestyle=style, color=colour, label=label, **kwargs)


def legend(figure, labels, columns):
    """Above the figure: the lines of its labels, and what thin and thick lines are."""
    handles = [line_of(look(label)['label'], look(label)['linestyle'], look(label)['color'],
                       linewidth=2) for label in labels]
    handles += [line_of('mean', linewidth=2), line_of('each seed', linewidth=0.6, alpha=0.6)]
    figure.legend(handles=handles, loc='outside upper center', ncols=columns)


def draw_curves(axis, runs, metric, label, scale=1, first=0, until=math.inf):
    """The seeds and their mean over the steps from `first` to `until`; returns the last mean."""
    steps = runs[0].log['step']
    shown = [i for i, step in enumerate(steps) if first <= step <= until]
    columns = [[scale * run.log[metric][i] for i in shown] for run in runs]
    means = [mean(of_seeds) for of_seeds in zip(*columns)]
    style = look(label)
    for column in columns:
        axis.plot([steps[i] for i in shown], column, linewidth=0.6, alpha=0.5,
                  color=style['color'], linestyle=style['linestyle'])
    axis.plot([steps[i] for i in shown], means, linewidth=2, **style)
    return means[-1]


def end_values(axis, ends, gap=0.09):
    """Texts [(y, text, colour)] at y to the right of the axis, moved apart to `gap` of its height.

    Where lines lie on each other, this says which. The limits of the axis must be set.
    """
    # transLimits alone does not look for new data.
    axis.get_ylim()
    ends = sorted((axis.transLimits.transform(axis.transScale.transform((1, y)))[1], text, colour)
                  for y, text, colour in ends)
    place = -math.inf
    for i, (y, text, colour) in enumerate(ends):
        # No higher than what leaves room for those above.
        place = max(place + gap, min(y, 1.02 - gap * (len(ends) - 1 - i)))
        axis.annotate(text, (1, place), xytext=(4, 0), xycoords='axes fraction',
                      textcoords='offset points', va='center', color=colour, fontsize=8)


def panel(axis, arms, metric, form='.0f', names=False, gap=0.09, **limits):
    """The curves {label: runs} of a metric, and the means at their end in figures beside them."""
    ends = []
    for label, runs in arms.items():
        y = draw_curves(axis, runs, metric, label, **limits)
        text = f'{y:{form}} {look(label)["label"]}' if names else f'{y:{form}}'
        ends.append((y, text, look(label)['color']))
    axis.margins(x=0)
    end_values(axis, ends, gap)


def draw_dots(axis, y, numbers, colour):
    """A dot a seed, each a little lower than the one before it, on a bar at their mean."""
    offsets = [0.5 * (0.5 - (i + 0.5) / len(numbers)) for i in range(len(numbers))]
    if numbers:
        axis.plot([mean(numbers)] * 2, [y - 0.36, y + 0.36], color=colour, linewidth=5, alpha=0.35,
                  solid_capstyle='butt')
    axis.plot(numbers, [y + offset for offset in offsets], '.', color=colour, markersize=4)


def draw_map(axis, image, vmax, cmap='Blues', aspect='auto'):
    """A matrix of values from 0 to vmax, without ticks; returns what a colour bar is made from."""
    shown = axis.imshow(image, vmin=0, vmax=vmax, cmap=cmap, aspect=aspect)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(True)
    return shown
