// Light, dark or as the system: set before the first paint, which is why this is no module.
(() => {
  const modes = ["auto", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try { return localStorage.getItem("sgl-pipeline-theme") ?? "auto"; } catch { return "auto"; }
  };
  let mode = stored();

  function apply() {
    const isDark = mode === "dark" || (mode !== "light" && system.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    document.dispatchEvent(new Event("themechange"));
  }

  window.theme = {
    get mode() { return mode; },
    next() {
      mode = modes[(modes.indexOf(mode) + 1) % modes.length];
      try { localStorage.setItem("sgl-pipeline-theme", mode); } catch { /* it holds for this visit */ }
      apply();
    },
  };
  system.addEventListener("change", apply);
  apply();
})();
