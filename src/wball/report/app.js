"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const short = (v) => String(Number(v.toPrecision(6))), short2 = (v) => String(Number(v.toPrecision(2)));

  // Theme: what the system asks for, unless the reader chose; paper is always light.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("wball-theme"); } catch { return null; } };
  let chosen = stored();
  const dark = () => (chosen ? chosen === "dark" : system.matches);
  const paint = (isDark) => {
    root.dataset.theme = isDark ? "dark" : "light";
    $("theme").setAttribute("aria-pressed", String(isDark));
    $("theme").textContent = isDark ? "Light" : "Dark";
  };
  $("theme").addEventListener("click", () => {
    chosen = dark() ? "light" : "dark";
    try { localStorage.setItem("wball-theme", chosen); } catch { /* private mode: for this visit only */ }
    paint(dark());
  });
  system.addEventListener("change", () => paint(dark()));
  addEventListener("beforeprint", () => paint(false));
  addEventListener("afterprint", () => paint(dark()));

  // Charts: SVG elements, coloured by the style sheet, so that a change of theme needs no redrawing.
  const svgNS = "http://www.w3.org/2000/svg";
  const make = (name, attributes, text) => {
    const element = document.createElementNS(svgNS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const nice = (top, count) => { // round numbers from 0 to top
    const raw = top / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((s) => s * power).find((s) => s >= raw * 0.999);
    return Array.from({ length: Math.floor(top / step * 1.0001) + 1 }, (_, k) => Number((k * step).toPrecision(6)));
  };
  const largest = Math.max(...data.runs.map((run) => run.curve.eps.at(-1)));
  function axes(box, height, top, labels) {
    const width = Math.max(240, box.clientWidth), ticks = nice(top, Math.max(2, Math.min(8, Math.floor(width / 90))));
    const left = 46, right = Math.max(24, 4 * short(ticks.at(-1)).length), above = 10, below = labels ? 44 : 26;
    const x = (eps) => left + (width - left - right) * eps / top;
    const y = (percent) => above + (height - above - below) * (1 - percent / 100);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    for (const v of [0, 25, 50, 75, 100]) {
      svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
      svg.append(make("text", { class: "tick", x: left - 8, y: y(v) + 4, "text-anchor": "end" }, `${v}`));
    }
    for (const v of ticks) {
      svg.append(make("line", { class: "grid", x1: x(v), x2: x(v), y1: above, y2: y(0) + 4 }));
      svg.append(make("text", { class: "tick", x: x(v), y: y(0) + 18, "text-anchor": "middle" }, short(v)));
    }
    if (labels) {
      svg.append(make("text", { class: "tick", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, `radius (${data.unit})`));
      svg.append(make("text", { class: "tick", x: -(y(50)), y: 12, transform: "rotate(-90)", "text-anchor": "middle" }, "accuracy (%)"));
    }
    return { svg, x, y, left, right: width - right };
  }
  // Points of a line; a search for the minimal radius has a step at each broken image.
  const points = (curve, values, at) => curve.eps.flatMap((eps, k) => {
    const here = [at.x(eps), at.y(values[k])];
    return curve.steps && k ? [[here[0], at.y(values[k - 1])], here] : [here];
  });
  const path = (list) => "M" + list.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L");
  const between = (upper, lower) => path([...upper, ...lower.slice().reverse()]) + "Z";
  const hidden = new Set();

  function draw() {
    const box = $("chart"), at = axes(box, box.clientHeight || 380, largest, true), shown = data.runs.map((run, k) => ({ ...run, k })).filter((run) => !hidden.has(run.k));
    for (const { curve, k } of shown) {
      const low = curve.interval.map((i) => i[0]), high = curve.interval.map((i) => i[1]);
      if (data.runs.length < 4) at.svg.append(make("path", { class: `interval c${k % 7}`, d: between(points(curve, high, at), points(curve, low, at)) }));
    }
    for (const { curve, k } of shown) {
      if (curve.certified) at.svg.append(make("path", { class: `curve proved c${k % 7}`, d: path(points(curve, curve.certified, at)) }));
      at.svg.append(make("path", { class: `curve c${k % 7}`, d: path(points(curve, curve.accuracy, at)) }));
      if (!curve.steps) curve.eps.forEach((eps, i) => at.svg.append(make("circle", { class: `c${k % 7}`, cx: at.x(eps), cy: at.y(curve.accuracy[i]), r: 4 })));
    }
    const ruler = make("line", { class: "ruler", y1: at.y(100), y2: at.y(0), visibility: "hidden" });
    at.svg.append(ruler);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    const every = [...new Set(data.runs.flatMap((run) => run.curve.eps))].sort((a, b) => a - b);
    const hover = (event) => {
      const scale = at.svg.getBoundingClientRect(), px = event.clientX - scale.left;
      const eps = every.reduce((best, e) => (Math.abs(at.x(e) - px) < Math.abs(at.x(best) - px) ? e : best), every[0]);
      ruler.setAttribute("x1", at.x(eps)); ruler.setAttribute("x2", at.x(eps)); ruler.setAttribute("visibility", "visible");
      const title = document.createElement("strong");
      title.textContent = `radius ${short(eps)}`;
      tip.replaceChildren(title, ...shown.filter((run) => eps <= run.curve.eps.at(-1)).map((run) => {
        const c = run.curve, i = c.eps.findLastIndex((e) => e <= eps), line = document.createElement("div"), dot = document.createElement("span");
        dot.className = `swatch c${run.k % 7}`;
        line.append(dot, `${run.name}: ${c.accuracy[i].toFixed(1)} % (${c.interval[i].map((v) => v.toFixed(0)).join("–")} %), ${c.broken[i]} of ${c.images} broken`
          + (c.certified ? `, ${c.certified[i].toFixed(1)} % proved` : ""));
        return line;
      }));
      tip.hidden = false;
      tip.style.left = `${Math.max(0, Math.min(at.x(eps) + 12, box.clientWidth - tip.offsetWidth))}px`;
    };
    at.svg.addEventListener("pointermove", hover);
    at.svg.addEventListener("pointerdown", hover);
    at.svg.addEventListener("pointerleave", () => { tip.hidden = true; ruler.setAttribute("visibility", "hidden"); });
    box.replaceChildren(at.svg, tip);
  }

  // One small chart a model: what is proved, what is broken, and what lies between.
  function drawBands() {
    const proved = data.runs.map((run, k) => ({ ...run, k })).filter((run) => run.curve.certified);
    const figures = proved.map(() => document.createElement("figure"));
    $("bands").replaceChildren(...figures); // all of them first, to have their widths
    proved.forEach(({ name, curve }, n) => {
      const figure = figures[n], box = document.createElement("div"), caption = document.createElement("figcaption");
      figure.append(box, caption);
      box.className = "plot";
      caption.textContent = name;
      const at = axes(box, 190, curve.eps.at(-1), false), flat = (v) => points(curve, curve.eps.map(() => v), at);
      const lines = { proved: points(curve, curve.certified, at), robust: points(curve, curve.accuracy, at) };
      const put = (kind, d) => { const band = make("path", { class: `band ${kind}`, d }); band.append(make("title", {}, kind)); at.svg.append(band); };
      put("proved", between(lines.proved, flat(0)));
      put("undecided", between(lines.robust, lines.proved));
      put("broken", between(flat(100), lines.robust));
      box.append(at.svg);
      const middle = Math.floor(curve.eps.length / 2), p = curve.certified[middle], b = 100 - curve.accuracy[middle];
      const said = document.createElement("small");
      said.textContent = `at ${short(curve.eps[middle])}: proved ${p.toFixed(1)}\u00a0%, undecided ${(100 - p - b).toFixed(1)}\u00a0%, broken ${b.toFixed(1)}\u00a0%`;
      caption.append(document.createElement("br"), said);
    });
  }
  $("legend").replaceChildren(...data.runs.map((run, k) => {
    const button = document.createElement("button"), dot = document.createElement("span");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    dot.className = `swatch c${k % 7}`;
    button.append(dot, run.name + (run.curve.certified ? " (dotted: proved)" : ""));
    button.addEventListener("click", () => {
      if (!hidden.delete(k)) hidden.add(k);
      button.setAttribute("aria-pressed", String(!hidden.has(k)));
      draw();
    });
    return button;
  }));
  let waiting = 0;
  const redraw = () => { draw(); if ($("bands")) drawBands(); };
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); });

  // Gallery: filters, and the first few of the images that match them.
  const form = $("filters"), cards = [...document.querySelectorAll(".card")], page = 12;
  let limit = page;
  const filter = () => {
    const want = new FormData(form);
    let matching = 0;
    for (const card of cards) {
      const d = card.dataset;
      const keep = ["run", "outcome", "label", "read"].every((key) => !want.get(key) || d[key] === want.get(key))
        && (!want.get("radius") || (d.radius !== "" && Number(d.radius) <= Number(want.get("radius")) * (1 + 1e-9)));
      matching += keep;
      card.hidden = !keep || matching > limit;
    }
    $("count").textContent = matching === cards.length ? `${matching} images` : `${matching} of ${cards.length} images`;
    $("none").hidden = matching > 0;
    $("more").hidden = matching <= limit;
  };
  const restart = () => { limit = page; filter(); };
  if (form) { // histograms have no gallery
    form.addEventListener("change", restart);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(restart));
    $("more").addEventListener("click", () => { limit += 4 * page; filter(); });
    filter();
  }

  // Transport explorer.
  function explore() {
    const runs = data.runs.map((run, k) => ({ ...run, k })).filter((run) => run.explorer);
    // It opens on the first image that was broken, at the smallest radius that breaks it.
    const broken = (it) => it.states.findIndex((state) => state.wrong);
    let run = runs.find((r) => r.explorer.items.some((it) => broken(it) >= 0)) || runs[0];
    let item = Math.max(0, run.explorer.items.findIndex((it) => broken(it) >= 0));
    const slider = $("ex-slider"), picker = $("ex-image");
    slider.max = run.explorer.radii.length;
    slider.value = broken(run.explorer.items[item]) + 1;
    $("ex-run").replaceChildren(...runs.map((r) => option(r.k, r.name)));
    $("ex-run").value = String(run.k);
    const open = () => {
      const items = run.explorer.items;
      slider.max = run.explorer.radii.length;
      slider.value = Math.min(slider.max, Math.max(1, Number(slider.value) || Math.ceil(slider.max / 2)));
      picker.replaceChildren(...items.map((it, k) => option(k, `${it.source}: ${it.label}`)));
      $("ex-thumbs").replaceChildren(...items.map((it, k) => {
        const button = document.createElement("button"), img = document.createElement("img");
        button.type = "button";
        button.setAttribute("aria-label", `image ${it.source}, ${it.label}`);
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
      $("ex-caption").textContent = state ? `predicted as ${state.read_as}` : "unchanged";
      $("ex-caption").className = wrong ? "wrong" : "";
      $("ex-said").textContent = !state ? `Image ${it.source}, class ${it.label}, without perturbation.`
        : `At radius ${said} the strongest image found is predicted as ${state.read_as} (${wrong ? "wrong" : "correct"}). `
        + (state.moved === null ? "" : `${short2(100 * state.moved)} % of the mass moves, by at most ${state.farthest.toFixed(1)} px. `)
        + `The largest pixel change is ${short2(state.largest)}.`
        + (it.radius === null ? " The evaluation found no adversarial example for this image." : ` The evaluation broke this image at radius ${short(it.radius)}.`);
    };
    const arrows = (ex, list) => {
      const svg = $("ex-svg"), top = Math.max(1e-9, ...list.map((a) => a[4]));
      svg.setAttribute("viewBox", `0 0 ${ex.width} ${ex.height}`);
      // Each arrow is drawn twice: a wide one in the colour of the page, so that it can be seen on any change.
      svg.replaceChildren(...list.flatMap(([r0, c0, r1, c1, mass]) => {
        const x0 = c0 + 0.5, y0 = r0 + 0.5, x1 = c1 + 0.5, y1 = r1 + 0.5;
        const length = Math.hypot(x1 - x0, y1 - y0), ux = (x1 - x0) / length, uy = (y1 - y0) / length;
        const weight = Math.sqrt(mass / top), head = 0.22 + 0.2 * weight;
        const bx = x1 - ux * head, by = y1 - uy * head;
        const d = `M${x0} ${y0}L${x1} ${y1}M${bx - uy * head * 0.6} ${by + ux * head * 0.6}L${x1} ${y1}L${bx + uy * head * 0.6} ${by - ux * head * 0.6}`;
        const width = (0.06 + 0.12 * weight) * ex.width / 28;
        return [make("path", { class: "halo", d, "stroke-width": 2.6 * width }), make("path", { class: "arrow", d, "stroke-width": width, opacity: 0.5 + 0.5 * weight })];
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
  redraw();
  if ($("ex-slider")) explore();
  root.dataset.ready = "true";
})();
