"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  // Okabe and Ito's colours, and lighter ones of the same hues for dark pages.
  const palettes = {
    light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07900", "#56b4e9", "#777777"],
    dark: ["#5cb3ea", "#f08c3c", "#3fcf9f", "#e3a3c6", "#e6b450", "#9bd3f7", "#b5b5b5"],
  };
  const short = (v) => String(Number(v.toPrecision(6)));

  // Theme: what the system asks for, unless the reader chose; paper is always light.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("wball-theme"); } catch { return null; } };
  let chosen = stored();
  const dark = () => (chosen ? chosen === "dark" : system.matches);
  const paint = (isDark) => {
    root.dataset.theme = isDark ? "dark" : "light";
    $("theme").setAttribute("aria-pressed", String(isDark));
    $("theme").textContent = isDark ? "Light" : "Dark";
    draw(isDark);
  };
  $("theme").addEventListener("click", () => {
    chosen = dark() ? "light" : "dark";
    try { localStorage.setItem("wball-theme", chosen); } catch { /* private mode: for this visit only */ }
    paint(dark());
  });
  system.addEventListener("change", () => paint(dark()));
  addEventListener("beforeprint", () => paint(false));
  addEventListener("afterprint", () => paint(dark()));

  // Accuracy against radius.
  function draw(isDark) {
    const ink = isDark ? "#eceae6" : "#1c1d21", grid = isDark ? "#32353e" : "#e6e3dc";
    const traces = [], colours = palettes[isDark ? "dark" : "light"];
    data.runs.forEach((run, k) => {
      const curve = run.curve, colour = colours[k % colours.length];
      const shape = curve.steps ? "hv" : "linear", mode = curve.steps ? "lines" : "lines+markers";
      traces.push({
        x: curve.eps, y: curve.accuracy, name: escaped(run.name), mode, line: { color: colour, width: 3, shape }, marker: { size: 8 },
        customdata: curve.broken.map((n) => [n, curve.images]),
        hovertemplate: "%{y:.2f} % right<br>%{customdata[0]} of %{customdata[1]} images broken<extra>" + escaped(run.name) + "</extra>",
      });
      if (curve.certified) traces.push({
        x: curve.eps, y: curve.certified, name: escaped(run.name) + ", proved", mode,
        line: { color: colour, width: 2, dash: "dot", shape }, marker: { size: 7, symbol: "diamond" },
        hovertemplate: "%{y:.2f} % proved<extra>" + escaped(run.name) + "</extra>",
      });
    });
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickcolor: grid };
    const layout = {
      font: { color: ink, family: "system-ui, sans-serif", size: 14 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 60, r: 16, t: 16, b: 56 }, hovermode: "x unified", modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: ink },
      hoverlabel: { bgcolor: isDark ? "#23262e" : "#ffffff", font: { color: ink } },
      xaxis: { ...axis, title: { text: "radius (" + escaped(data.unit) + ")" }, rangemode: "tozero", unifiedhovertitle: { text: "radius %{x}" } },
      yaxis: { ...axis, title: { text: "accuracy (%)" }, range: [-2, 102] },
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0 }, showlegend: traces.length > 1,
    };
    Plotly.react("chart", traces, layout, { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
  }
  function escaped(text) {
    const span = document.createElement("span");
    span.textContent = text;
    return span.innerHTML;
  }

  // Gallery filters.
  const form = $("filters"), cards = [...document.querySelectorAll(".card")];
  const filter = () => {
    const want = new FormData(form);
    let shown = 0;
    for (const card of cards) {
      const d = card.dataset;
      const keep = ["run", "outcome", "label", "read"].every((key) => !want.get(key) || d[key] === want.get(key))
        && (!want.get("radius") || (d.radius !== "" && Number(d.radius) <= Number(want.get("radius")) * (1 + 1e-9)));
      card.hidden = !keep;
      shown += keep;
    }
    $("count").textContent = shown === cards.length ? `${shown} images` : `${shown} of ${cards.length} images`;
    $("none").hidden = shown > 0;
  };
  if (form) { // histograms have no gallery
    form.addEventListener("change", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(filter));
    filter();
  }

  // Transport explorer.
  const svgNS = "http://www.w3.org/2000/svg";
  function explore() {
    const runs = data.runs.map((run, k) => ({ ...run, k })).filter((run) => run.explorer);
    let run = runs[0], item = 0;
    const slider = $("ex-slider"), picker = $("ex-image");
    $("ex-run").replaceChildren(...runs.map((r) => option(r.k, r.name)));
    const open = () => {
      const items = run.explorer.items;
      slider.max = run.explorer.radii.length;
      slider.value = Math.min(slider.max, Math.max(1, Number(slider.value) || Math.ceil(slider.max / 2)));
      picker.replaceChildren(...items.map((it, k) => option(k, `${it.index}: ${it.label}`)));
      $("ex-thumbs").replaceChildren(...items.map((it, k) => {
        const button = document.createElement("button"), img = document.createElement("img");
        button.type = "button";
        button.setAttribute("aria-label", `image ${it.index}, ${it.label}`);
        img.src = it.x; img.alt = "";
        button.append(img);
        button.addEventListener("click", () => pick(k));
        return button;
      }));
      pick(Math.min(item, items.length - 1));
    };
    const pick = (k) => {
      item = k;
      picker.value = String(k);
      [...$("ex-thumbs").children].forEach((b, i) => b.setAttribute("aria-pressed", String(i === k)));
      show();
    };
    const show = () => {
      const ex = run.explorer, it = ex.items[item], step = Number(slider.value);
      const radius = step ? ex.radii[step - 1] : 0, state = step ? it.states[step - 1] : null;
      const said = step ? short(radius) : "0";
      $("ex-radius").textContent = said;
      slider.setAttribute("aria-valuetext", `radius ${said}`);
      $("ex-x").src = it.x;
      $("ex-z").src = state ? state.z : it.x;
      $("ex-change").src = state ? state.change : blank(ex.width, ex.height);
      arrows(ex, state && $("ex-arrows").checked ? state.arrows : []);
      const wrong = Boolean(state && state.wrong);
      $("ex-caption").textContent = state ? `read as ${state.read_as}` : "unchanged";
      $("ex-caption").className = wrong ? "wrong" : "";
      $("ex-said").textContent = !state ? `Image ${it.index}, class ${it.label}. Nothing moved yet.`
        : `At radius ${said} the strongest image found is read as ${state.read_as}${wrong ? " (wrong)" : " (right)"}. `
        + (state.moved === null ? "" : `${(100 * state.moved).toFixed(1)} % of the mass moves, at most ${state.farthest.toFixed(1)} px far. `)
        + `The largest change of a pixel is ${state.largest.toFixed(2)}.`
        + (it.radius === null ? " The evaluation found no example for this image." : ` The evaluation broke it at radius ${short(it.radius)}.`);
    };
    const arrows = (ex, list) => {
      const svg = $("ex-svg"), top = Math.max(1e-9, ...list.map((a) => a[4]));
      svg.setAttribute("viewBox", `0 0 ${ex.width} ${ex.height}`);
      svg.replaceChildren(...list.map(([r0, c0, r1, c1, mass]) => {
        const path = document.createElementNS(svgNS, "path");
        const x0 = c0 + 0.5, y0 = r0 + 0.5, x1 = c1 + 0.5, y1 = r1 + 0.5;
        const length = Math.hypot(x1 - x0, y1 - y0), ux = (x1 - x0) / length, uy = (y1 - y0) / length;
        const weight = Math.sqrt(mass / top), head = 0.22 + 0.2 * weight;
        const bx = x1 - ux * head, by = y1 - uy * head;
        path.setAttribute("d", `M${x0} ${y0}L${x1} ${y1}M${bx - uy * head * 0.6} ${by + ux * head * 0.6}L${x1} ${y1}L${bx + uy * head * 0.6} ${by - ux * head * 0.6}`);
        path.setAttribute("fill", "none");
        path.setAttribute("stroke", "currentColor");
        path.setAttribute("stroke-linecap", "round");
        path.setAttribute("stroke-linejoin", "round");
        path.setAttribute("stroke-width", (0.03 + 0.13 * weight) * ex.width / 28);
        path.setAttribute("opacity", 0.35 + 0.6 * weight);
        return path;
      }));
    };
    $("ex-run").addEventListener("change", (e) => { run = runs.find((r) => String(r.k) === e.target.value); open(); });
    picker.addEventListener("change", () => pick(Number(picker.value)));
    slider.addEventListener("input", show);
    $("ex-arrows").addEventListener("change", show);
    open();
  }
  const option = (value, text) => {
    const o = document.createElement("option");
    o.value = String(value);
    o.textContent = text;
    return o;
  };
  const blanks = {};
  function blank(width, height) {
    const key = `${width}x${height}`;
    if (!blanks[key]) {
      const canvas = document.createElement("canvas");
      canvas.width = width; canvas.height = height;
      blanks[key] = canvas.toDataURL();
    }
    return blanks[key];
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.previousElementSibling.textContent;
      try { await navigator.clipboard.writeText(text); } catch {
        const range = document.createRange();
        range.selectNodeContents(button.previousElementSibling);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  paint(dark());
  if ($("ex-slider")) explore();
  root.dataset.ready = "true";
})();
