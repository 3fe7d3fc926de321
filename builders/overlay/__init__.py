"""Trees above trees, in overlayfs' own form: what a stack shows, kept as one, cut down, or freed of its marks. Trees in, trees out.

Face::

    stack  overlay_xattr, stack_uppers
    trees  cut_to_prefix, directory_like, drop_marks, drop_origins, exclude, leading, Lookup, rooted, Underneath
"""
