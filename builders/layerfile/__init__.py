"""Layer files: TOML in, a layer out. The recipe is a checked value; steps run in sandboxes and are cached by what they read (docs/layerfile.md).

Face::

    build      build_layerfile, load_recipe
    stepcache  StepCache
"""
