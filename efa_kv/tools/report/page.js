"use strict";
(() => {
  const root = document.documentElement;
  const told = document.getElementById("told");
  const theme = document.getElementById("theme");

  function paint(dark) {
    root.dataset.theme = dark ? "dark" : "light";
    theme.setAttribute("aria-pressed", String(dark));
    theme.textContent = dark ? "Light" : "Dark";
  }
  paint(window.matchMedia("(prefers-color-scheme: dark)").matches);
  theme.addEventListener("click", () => paint(root.dataset.theme !== "dark"));

  // What is pointed at, or reached by the keyboard, is told in words at the foot of the page.
  function tell(event) {
    const shape = event.target.closest("[data-told]");
    told.textContent = shape ? shape.dataset.told : "";
  }
  document.addEventListener("focusin", tell);
  document.addEventListener("pointerover", tell);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") told.textContent = "";
  });

  const data = document.getElementById("perfetto");
  if (!data) return;

  // A page opened from a file may not be allowed to use the clipboard directly.
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = document.createElement("textarea");
      field.value = text;
      document.body.append(field);
      field.select();
      const done = document.execCommand("copy");
      field.remove();
      if (!done) throw new Error("the browser does not allow it");
    }
  }
  document.getElementById("copy").addEventListener("click", async () => {
    try {
      await copy(data.textContent);
      told.textContent = "Copied. Open ui.perfetto.dev and paste it there as a file.";
    } catch (problem) {
      told.textContent = `Not copied: ${problem.message}`;
    }
  });
  document.getElementById("save").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([data.textContent], { type: "application/json" }));
    link.download = "efa-kv-trace.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });
})();
