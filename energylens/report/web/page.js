"use strict";
/* The page of a front: filters, the front among what they leave, charts of it, a table, one selected configuration. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const fields = new Map(data.fields.map((field) => [field.name, field]));
  const exact = new Map(data.exact.map((e) => [e.index, e]));
  const column = data.configs.values;
  const configs = data.configs.batch.map((batch, i) => ({ i, batch, prefills: data.configs.prefills[i], layout: data.configs.layout[i] }));
  const value = (c, name) => column[name][c.i];
  const known = (c, name) => value(c, name) !== null && value(c, name) !== undefined;

  // ---------------------------------------------------------------- words and numbers

  const PREFIXES = [[1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]];
  const digits = (x) => (x === 0 ? "0" : x.toFixed(Math.min(12, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(x)))))));
  const quantity = (x, unit) => {
    if (x === null || x === undefined) return "–";
    if (unit === "count") return String(x);
    if (unit === "" || unit === "money") return digits(x);
    if (x === 0) return `0 ${unit}`;
    const prefixes = unit === "s" || unit === "W" ? PREFIXES.slice(1) : PREFIXES;
    const [factor, letter] = prefixes.find(([f]) => Math.abs(x) >= f) || prefixes[prefixes.length - 1];
    return `${digits(x / factor)} ${letter}${unit}`;
  };
  const shown = (c, name) => quantity(value(c, name), fields.get(name).unit);
  const interval = (c, name) => {
    const ends = exact.get(c.i)?.intervals[name];
    return ends && ends[0] < ends[1] ? `${quantity(ends[0], fields.get(name).unit)} … ${quantity(ends[1], fields.get(name).unit)}` : null;
  };
  const nameOf = (objective) => fields.get(data.objectives.find((o) => o.name === objective).value).label;
  const title = (c) => `${data.layouts[c.layout]}, batch ${c.prefills === null ? "" : `${c.prefills}/`}${c.batch}`;
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, text] of Object.entries(attributes)) node.setAttribute(name, text);
    node.append(...children);
    return node;
  };

  // ---------------------------------------------------------------- state

  const range = (all) => [all.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, b) => Math.max(a, b), -Infinity)];
  const limits = data.limits.map((limit) => {
    const all = configs.filter((c) => known(c, limit.value)).map((c) => value(c, limit.value));
    const [low, high] = range(all);
    return { ...limit, low, high, open: limit.sign > 0 ? high : low, now: limit.given };
  }).filter((limit) => limit.low < limit.high);
  const [smallest, largest] = range(data.configs.batch);
  const start = () => ({ layouts: new Set(data.layouts.keys()), low: smallest, high: largest });
  let state = start(), selected = null, view = null;

  const passes = (c) => state.layouts.has(c.layout) && c.batch >= state.low && c.batch <= state.high
    && limits.every((l) => l.now === null || l.sign * value(c, l.value) <= l.sign * l.now * (1 + 1e-9));

  /* Configurations that no other one beats, the best by the first objective first; ties are kept, as in the search. */
  const frontOf = (rows) => {
    const costs = new Map(rows.map((c) => [c, data.objectives.map(
      (o) => Math.round(o.sign * Math.log(value(c, o.value)) * 1e8) / 1e8)]));
    const order = (a, b) => {
      const [p, q] = [costs.get(a), costs.get(b)];
      const j = p.findIndex((x, k) => x !== q[k]);
      return j < 0 ? a.i - b.i : p[j] - q[j];
    };
    const front = [];
    for (const c of [...rows].sort(order)) {
      const own = costs.get(c);
      const beaten = front.some((f) => {
        const other = costs.get(f);
        return other.every((x, k) => x <= own[k]) && other.some((x, k) => x < own[k]);
      });
      if (!beaten) front.push(c);
    }
    return { front, costs };
  };

  /* Of what is predicted exactly: the best by each objective, and what its interval does not tell from it. */
  const marksOf = (rows, costs) => {
    const marks = new Map(rows.filter((c) => exact.has(c.i)).map((c) => [c, { best: [], tied: [] }]));
    data.objectives.forEach((o, j) => {
      let best = null;
      for (const c of marks.keys()) {
        const key = [costs.get(c)[j], ...costs.get(c), c.i];
        const k = best === null ? 0 : key.findIndex((x, n) => x !== best.key[n]);
        if (best === null || key[k] < best.key[k]) best = { c, key };
      }
      if (!best) return;
      marks.get(best.c).best.push(o.name);
      const [low, high] = exact.get(best.c.i).intervals[o.value];
      for (const [c, own] of marks) {
        const [a, b] = exact.get(c.i).intervals[o.value];
        if (c !== best.c && a <= high && low <= b) own.tied.push(o.name);
      }
    });
    return marks;
  };

  // ---------------------------------------------------------------- colours

  const COLOURS = {
    light: ["#0067a3", "#c44e00", "#00785c", "#9a3d86", "#6f5500", "#a8123e", "#4a4fb5", "#4f5d70"],
    dark: ["#5db7ff", "#ff9d57", "#45d6ae", "#e99ad5", "#e0c04c", "#ff8099", "#a9adff", "#b4bfce"],
  };
  const SHAPES = ["circle", "rect", "triangle", "rectRot", "star"];
  const KINDS = ["gemm", "attention", "moe", "collective", "idle", "wait", "elementwise", "norm", "copy", "router", "sampling", "overhead"];
  const KIND_COLOURS = {
    light: ["#0067a3", "#c44e00", "#00785c", "#9a3d86", "#8c96a3", "#c3c9d1", "#b08a00", "#4a4fb5", "#a8123e", "#3d8f2d", "#7a3b12", "#222831"],
    dark: ["#4da6ef", "#f28c48", "#34b892", "#d583c0", "#6e7885", "#444d58", "#d3b23c", "#9397f0", "#f26d88", "#86cf75", "#c99572", "#dfe4ea"],
  };
  let theme = "light";
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (layout) => COLOURS[theme][view.ranked.indexOf(layout) % COLOURS[theme].length];
  const shape = (layout) => SHAPES[Math.floor(view.ranked.indexOf(layout) / COLOURS[theme].length) % SHAPES.length];
  const soft = (hex) => `${hex}66`;

  // ---------------------------------------------------------------- charts

  const charts = {};
  const draw = (id, config, label) => {
    charts[id]?.destroy();
    charts[id] = new Chart($(id), config);
    $(id).setAttribute("aria-label", label);
  };
  const axis = (field, type = "logarithmic") => ({
    type,
    title: { display: true, text: field.label, color: css("--text") },
    grid: { color: css("--grid") },
    border: { color: css("--line") },
    ticks: {
      color: css("--soft"), maxRotation: 0, autoSkipPadding: 18,
      callback: (x) => (type !== "logarithmic" || [1, 2, 3, 5].includes(Number(x.toExponential().split("e")[0])) ? quantity(x, field.unit).replace(/\.0+(?= |$)/, "") : ""),
    },
  });
  const base = () => ({
    animation: false, responsive: true, maintainAspectRatio: false, parsing: false,
    plugins: {
      legend: {
        labels: {
          color: css("--text"), usePointStyle: true, boxHeight: 7,
          // A dataset's points may be pale or hollow; its name never is, and it has the line's dashes.
          generateLabels: (chart) => Chart.defaults.plugins.legend.labels.generateLabels(chart).map((label) => {
            const { nameColour: own, borderDash: lineDash = [] } = chart.data.datasets[label.datasetIndex];
            return own ? { ...label, fillStyle: own, strokeStyle: own } : { ...label, lineDash };
          }),
        },
      },
      tooltip: { backgroundColor: "#0b1016ee", titleColor: "#fff", bodyColor: "#fff", padding: 10, displayColors: false },
    },
  });

  /* Intervals of exactly predicted points of the front, behind the points. */
  const whiskers = {
    id: "whiskers",
    beforeDatasetsDraw(chart) {
      const [x, y] = [$("axis-x").value, $("axis-y").value];
      const { ctx, scales, chartArea: area } = chart;
      ctx.save();
      ctx.beginPath();
      ctx.rect(area.left, area.top, area.width, area.height);
      ctx.clip();
      ctx.lineWidth = 1;
      for (const c of view.front.filter((f) => exact.has(f.i))) {
        ctx.strokeStyle = soft(colour(c.layout));
        const ends = exact.get(c.i).intervals;
        const [px, py] = [scales.x.getPixelForValue(value(c, x)), scales.y.getPixelForValue(value(c, y))];
        ctx.beginPath();
        if (ends[x]) { ctx.moveTo(scales.x.getPixelForValue(ends[x][0]), py); ctx.lineTo(scales.x.getPixelForValue(ends[x][1]), py); }
        if (ends[y]) { ctx.moveTo(px, scales.y.getPixelForValue(ends[y][0])); ctx.lineTo(px, scales.y.getPixelForValue(ends[y][1])); }
        ctx.stroke();
      }
      ctx.restore();
    },
  };

  const describe = (c) => {
    const lines = [$("axis-y").value, $("axis-x").value].map((name) => {
      const ends = interval(c, name);
      return `${fields.get(name).label}: ${shown(c, name)}${ends ? ` (${ends})` : " (from the table)"}`;
    });
    const own = view.marks.get(c);
    if (own?.best.length) lines.push(`best ${own.best.map(nameOf).join(", ")}`);
    if (own?.tied.length) lines.push(`tied ${own.tied.map(nameOf).join(", ")}`);
    return lines;
  };

  const drawScatter = () => {
    const [x, y] = [$("axis-x").value, $("axis-y").value];
    const point = (c) => ({ x: value(c, x), y: value(c, y), c });
    const onFront = new Set(view.front), colourful = new Set(view.front.map((c) => c.layout));
    const plottable = view.rows.filter((c) => known(c, x) && known(c, y));
    const datasets = view.ranked.filter((layout) => colourful.has(layout)).map((layout) => {
      const own = plottable.filter((c) => c.layout === layout).sort((a, b) => onFront.has(a) - onFront.has(b));
      return {
        label: data.layouts[layout], data: own.map(point), pointStyle: shape(layout), order: 1, nameColour: colour(layout),
        borderColor: own.map((c) => (onFront.has(c) ? colour(layout) : soft(colour(layout)))),
        backgroundColor: own.map((c) => (onFront.has(c) && exact.has(c.i) ? colour(layout) : "transparent")),
        pointRadius: own.map((c) => (onFront.has(c) ? (exact.has(c.i) ? 5.5 : 3.5) : 1.8)), pointHoverRadius: 7,
      };
    });
    const beaten = plottable.filter((c) => !colourful.has(c.layout));
    if (beaten.length) datasets.push({
      label: "layouts off the front", data: beaten.map(point), pointRadius: 1.6, order: 3,
      borderColor: css("--beaten"), backgroundColor: css("--beaten"),
    });
    if (data.objectives.length === 2 && data.objectives.every((o) => [x, y].includes(o.value))) datasets.push({
      label: "front", data: view.front.map(point).sort((a, b) => a.x - b.x), showLine: true, pointRadius: 0, pointHitRadius: 0,
      pointStyle: "line", borderColor: css("--text"), borderWidth: 1, order: 2,
    });
    if (selected && known(selected, x) && known(selected, y)) datasets.push({
      label: "selected", data: [point(selected)], pointRadius: 11, pointHitRadius: 0, borderWidth: 2.5, order: 0,
      borderColor: css("--text"), backgroundColor: "transparent", pointStyle: "circle",
    });
    const options = base();
    const room = (name) => {  // so that no point lies on the edge
      const [low, high] = range(plottable.map((c) => value(c, name)));
      const edge = high / low < 1.5 ? 1.5 : (high / low) ** 0.04;
      return plottable.length ? { min: low / edge, max: high * edge } : {};
    };
    options.scales = { x: { ...axis(fields.get(x)), ...room(x) }, y: { ...axis(fields.get(y)), ...room(y) } };
    options.plugins.tooltip.callbacks = { title: (items) => title(items[0].raw.c), label: (item) => describe(item.raw.c) };
    options.plugins.tooltip.filter = (item, at) => at === 0;
    options.onClick = (event, items) => { if (items.length) select(items[0].element.$context.raw.c); };
    const label = `${fields.get(y).label} against ${fields.get(x).label}: ${view.rows.length} configurations, ${view.front.length} on the front; the table below holds them.`;
    draw("scatter", { type: "scatter", data: { datasets }, options, plugins: [whiskers] }, label);
  };

  const drawBars = () => {
    const phase = $("bars-phase").value, by = $("bars-by").value, share = $("bars-as").value === "share";
    const rows = view.front.filter((c) => exact.has(c.i));
    const sums = rows.map((c) => {
      const sum = new Map();
      for (const r of exact.get(c.i).breakdown) if (r.phase === phase) sum.set(r[by], (sum.get(r[by]) || 0) + r.energy_j);
      return sum;
    });
    const all = new Map();
    for (const sum of sums) {
      const whole = [...sum.values()].reduce((a, b) => a + b, 0);
      for (const [name, joules] of sum) all.set(name, Math.max(all.get(name) || 0, joules / whole));
    }
    let names = [...all.keys()].sort((a, b) => (by === "kind" ? KINDS.indexOf(a) - KINDS.indexOf(b) : all.get(b) - all.get(a)));
    const rest = new Set(names.slice(11));
    if (rest.size > 1) {
      for (const sum of sums) sum.set("others", [...rest].reduce((total, name) => total + (sum.get(name) || 0), 0));
      names = [...names.slice(0, 11), "others"];
    }
    const per = { prefill: "energy_per_prompt_j", decode: "energy_per_token_j", request: "energy_per_request_j" }[phase];
    const scale = rows.map((c, i) => (share ? 100 : value(c, per)) / [...sums[i].values()].reduce((a, b) => a + b, 0) * 1);
    const datasets = names.map((name, k) => ({
      label: name, stack: "all", backgroundColor: KIND_COLOURS[theme][by === "kind" ? KINDS.indexOf(name) : k],
      data: rows.map((c, i) => ({ x: (sums[i].get(name) || 0) * scale[i], y: `${title(c)} · ${shown(c, per)}` })),
    }));
    $("bars-box").style.height = `${Math.max(160, 90 + 26 * rows.length)}px`;
    const options = base();
    options.indexAxis = "y";
    const field = share ? { label: `share of the ${fields.get(per).label}`, unit: "%" } : fields.get(per);
    options.scales = { x: { ...axis(field, "linear"), stacked: true }, y: { type: "category", stacked: true, ticks: { color: css("--text"), autoSkip: false }, grid: { display: false } } };
    if (share) { options.scales.x.max = 100; options.scales.x.ticks.callback = (x) => `${x} %`; }
    options.plugins.tooltip.callbacks = { label: (item) => `${item.dataset.label}: ${share ? `${item.raw.x.toFixed(1)} %` : quantity(item.raw.x, "J")}` };
    options.plugins.legend.labels.pointStyle = "rect";
    draw("bars", { type: "bar", data: { labels: rows.map((c) => `${title(c)} · ${shown(c, per)}`), datasets }, options },
      `Energy of ${phase} by ${by} of each exactly predicted configuration of the front`);
  };

  const line = (label, points, layout, extra = {}) => ({
    label, data: points, borderColor: colour(layout), backgroundColor: colour(layout), pointStyle: shape(layout), borderWidth: 2,
    borderDash: shape(layout) === SHAPES[0] ? [] : [6, 3], ...extra,
  });
  const drawBatches = () => {
    const name = $("batch-of").value, layouts = view.ranked.filter((layout) => view.rows.some((c) => c.layout === layout)).slice(0, 12);
    const datasets = layouts.map((layout) => line(data.layouts[layout],
      view.rows.filter((c) => c.layout === layout).sort((a, b) => a.batch - b.batch).map((c) => ({ x: c.batch, y: value(c, name), c })),
      layout, { pointRadius: 0, pointHitRadius: 6 }));
    const options = base();
    options.plugins.legend.labels.pointStyle = "line";
    options.plugins.legend.labels.pointStyleWidth = 26;
    options.scales = { x: axis({ label: "batch of a replica", unit: "" }), y: axis(fields.get(name)) };
    options.scales.x.ticks.callback = (x) => (Number.isInteger(Math.log2(x)) ? String(x) : "");
    options.scales.x.afterBuildTicks = (scale) => {
      scale.ticks = Array.from({ length: 18 }, (_, k) => ({ value: 2 ** k })).filter((t) => t.value >= scale.min && t.value <= scale.max);
    };
    options.plugins.tooltip.callbacks = { title: (items) => title(items[0].raw.c), label: (item) => shown(item.raw.c, name) };
    draw("batches", { type: "line", data: { datasets }, options }, `${fields.get(name).label} against the batch, for each layout`);
  };
  const drawContexts = () => {
    const rows = new Set([selected, ...[...view.marks].filter(([, m]) => m.best.length).map(([c]) => c)]);
    for (const layout of view.ranked) rows.add(view.front.find((c) => c.layout === layout && exact.has(c.i)));
    const chosen = [...rows].filter((c) => c && exact.get(c.i)?.by_context.length).slice(0, 8);
    const datasets = chosen.map((c, k) => line(title(c),
      exact.get(c.i).by_context.map((p) => ({ x: p[0], y: p[1], p, c })), c.layout,
      { pointRadius: 3, borderWidth: c === selected ? 3 : 1.5, borderDash: [[], [6, 3], [2, 2], [9, 3, 2, 3]][k % 4] }));
    const options = base();
    options.plugins.legend.labels.pointStyle = "line";
    options.plugins.legend.labels.pointStyleWidth = 34;
    options.scales = { x: axis({ label: "context, tokens", unit: "" }), y: axis(fields.get("energy_per_token_j")) };
    options.scales.x.afterBuildTicks = (scale) => {
      scale.ticks = [...new Set(datasets.flatMap((d) => d.data.map((p) => p.x)))].sort((a, b) => a - b).map((t) => ({ value: t }));
    };
    options.scales.x.ticks.callback = (x) => String(Math.round(x));
    options.plugins.tooltip.callbacks = {
      title: (items) => title(items[0].raw.c),
      label: (item) => `context ${item.raw.x}: ${quantity(item.raw.y, "J")} (${quantity(item.raw.p[2], "J")} … ${quantity(item.raw.p[3], "J")})`,
    };
    draw("contexts", { type: "line", data: { datasets }, options }, "Energy of a token against the context, for configurations of the front");
  };

  // ---------------------------------------------------------------- texts

  const marks = (c) => {
    const own = view.marks.get(c) || { best: [], tied: [] };
    return [
      ...own.best.map((name) => make("span", { class: "mark best" }, `best ${nameOf(name)}`)),
      ...own.tied.map((name) => make("span", { class: "mark" }, `tied ${nameOf(name)}`)),
    ];
  };
  const pickCards = () => {
    $("picks").replaceChildren(...data.objectives.map((o) => {
      const found = [...view.marks].find(([, m]) => m.best.includes(o.name));
      const card = make("div", { class: "card" }, make("h3", {}, `Best ${fields.get(o.value).label}`));
      if (!found) return card.append(make("p", {}, "nothing that is predicted exactly is left by the filters")), card;
      const [c] = found, ends = interval(c, o.value);
      const tied = [...view.marks.values()].filter((m) => m.tied.includes(o.name)).length;
      card.append(make("p", { class: "big" }, shown(c, o.value)), make("p", {}, title(c)));
      card.append(make("p", { class: "hint" }, `${ends ? `${data.level} interval ${ends}; ` : ""}${tied ? `${tied} more tied with it` : "no other one tied with it"}`));
      return card;
    }));
  };
  const fillTable = () => {
    const names = data.columns;
    const head = make("tr", {}, make("th", { scope: "col", class: "words" }, "configuration"),
      make("th", { scope: "col", class: "words" }, "best, tied"), ...names.map((name) => make("th", { scope: "col" }, fields.get(name).label)));
    $("front").tHead.replaceChildren(head);
    const rows = view.front.filter((c) => exact.has(c.i));
    $("front").tBodies[0].replaceChildren(...rows.map((c) => {
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = colour(c.layout);
      const button = make("button", { type: "button", "data-index": c.i }, title(c));
      button.addEventListener("click", () => select(c));
      const row = make("tr", {}, make("td", { class: "words" }, swatch, button),
        make("td", { class: "words" }, ...marks(c)), ...names.map((name) => make("td", { title: interval(c, name) || "" }, shown(c, name))));
      if (c === selected) row.setAttribute("aria-current", "true");
      return row;
    }));
    const hidden = view.front.length - rows.length;
    $("front-hint").textContent = [
      rows.length ? `Tied: the ${data.level} intervals of that objective overlap with the best one's.` : "",
      hidden ? `${hidden} more on the front are known from the table to ${data.table_error} and not listed; --top predicts more of them exactly.` : "",
    ].join(" ").trim();
  };
  const fillSelected = () => {
    const c = selected, more = c && exact.get(c.i);
    $("selected-heading").textContent = c ? title(c) : "Nothing is left by the filters";
    if (!c) { $("selected-body").replaceChildren(); return; }
    const list = make("dl");
    for (const field of data.fields.filter((f) => known(c, f.name))) {
      const ends = interval(c, field.name);
      list.append(make("dt", {}, field.label), make("dd", {}, shown(c, field.name) + (ends ? `  (${ends})` : "")));
    }
    if (!more) {
      $("selected-body").replaceChildren(list, make("p", { class: "hint" },
        `Known from the table, to ${data.table_error}; a breakdown and an interval come with an exact prediction (--top).`));
      return;
    }
    list.append(make("dt", {}, "memory of a GPU"), make("dd", {}, more.memory), make("dt", {}, "weakest source"), make("dd", {}, more.source));
    for (const [engine, command] of more.launch) list.append(make("dt", {}, engine), make("dd", {}, make("code", {}, command)));
    const phases = [...new Set(more.breakdown.map((r) => r.phase))].filter((p) => p !== "request");
    const tables = phases.map((phase) => {
      const rows = more.breakdown.filter((r) => r.phase === phase).sort((a, b) => b.energy_j - a.energy_j);
      const whole = rows.reduce((sum, r) => sum + r.energy_j, 0);
      const cells = (r) => [
        make("td", { class: "words" }, r.op), make("td", { class: "words" }, r.kind), make("td", {}, quantity(r.latency_s, "s")),
        make("td", {}, quantity(r.energy_j, "J")), make("td", {}, `${((100 * r.energy_j) / whole).toFixed(1)} %`), make("td", { class: "words" }, r.source),
      ];
      const head = ["op", "kind", "latency", "energy", "share", "source"].map((t) => make("th", { scope: "col", class: /latency|energy|share/.test(t) ? "" : "words" }, t));
      return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${phase}, op by op` },
        make("table", {}, make("caption", {}, `${phase} of the whole batch, by energy`), make("thead", {}, make("tr", {}, ...head)),
          make("tbody", {}, ...rows.map((r) => make("tr", {}, ...cells(r))))));
    });
    $("selected-body").replaceChildren(list, make("div", { class: "pair" }, ...tables));
  };
  const fillFacts = () => {
    const list = make("ul", {}, ...data.facts.map((fact) => make("li", {}, fact)));
    $("facts").replaceChildren(make("h2", {}, "Counts, notes and sources"), list);
  };

  // ---------------------------------------------------------------- changes

  const update = () => {
    const rows = configs.filter((c) => passes(c) && data.objectives.every((o) => known(c, o.value)));
    const { front, costs } = frontOf(rows);
    const ranked = [...new Set([...front.map((c) => c.layout), ...data.layouts.keys()])];
    view = { rows, front, marks: marksOf(rows, costs), ranked };
    if (!selected || !rows.includes(selected)) {
      selected = [...view.marks].find(([, m]) => m.best.includes(data.objectives[0].name))?.[0] || front[0] || null;
    }
    $("status").textContent = `${rows.length} of ${configs.length} configurations, ${front.length} on the front, ${front.filter((c) => exact.has(c.i)).length} of them predicted exactly`;
    pickCards();
    show();
  };
  const show = () => { drawScatter(); drawBars(); drawBatches(); drawContexts(); fillTable(); fillSelected(); };
  const select = (c) => {
    selected = c;
    drawScatter(); drawContexts(); fillSelected();
    for (const button of $("front").querySelectorAll("button")) {
      const own = Number(button.dataset.index) === c.i, row = button.closest("tr");
      if (own) { row.setAttribute("aria-current", "true"); row.scrollIntoView({ block: "nearest" }); } else row.removeAttribute("aria-current");
    }
  };

  // ---------------------------------------------------------------- filters

  const slider = (limit) => Math.round(1000 * Math.log(Math.min(limit.high, Math.max(limit.low, limit.now ?? limit.open)) / limit.low) / Math.log(limit.high / limit.low));
  const say = (limit, output) => { output.textContent = limit.now === null ? "any" : quantity(limit.now, fields.get(limit.value).unit); };
  const fillFilters = () => {
    $("layouts").replaceChildren(...data.layouts.map((name, i) => {
      const box = make("input", { type: "checkbox", value: i });
      box.checked = state.layouts.has(i);
      box.addEventListener("change", () => { state.layouts[box.checked ? "add" : "delete"](i); update(); });
      return make("label", {}, box, ` ${name}`);
    }));
    for (const [id, key] of [["batch-min", "low"], ["batch-max", "high"]]) {
      const input = $(id);
      Object.assign(input, { min: smallest, max: largest, value: state[key] });
      input.oninput = () => { if (input.value !== "") { state[key] = Number(input.value); update(); } };
    }
    $("limits").parentElement.hidden = limits.length === 0;
    $("limits").replaceChildren(...limits.map((limit) => {
      const input = make("input", { type: "range", min: 0, max: 1000, "data-limit": limit.name }), output = make("output");
      input.value = slider(limit);
      say(limit, output);
      input.setAttribute("aria-valuetext", output.textContent);
      input.addEventListener("input", () => {
        const open = Number(input.value) === (limit.sign > 0 ? 1000 : 0);
        limit.now = open ? null : limit.low * (limit.high / limit.low) ** (Number(input.value) / 1000);
        say(limit, output);
        input.setAttribute("aria-valuetext", output.textContent);
        update();
      });
      return make("label", {}, make("span", {}, `${limit.label} ${limit.sign > 0 ? "at most" : "at least"}`), input, output);
    }));
  };
  const choose = (layouts) => { state.layouts = new Set(layouts); fillFilters(); update(); };
  $("all").addEventListener("click", () => choose(data.layouts.keys()));
  $("none").addEventListener("click", () => choose([]));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("reset").addEventListener("click", (event) => {
    event.preventDefault();
    state = start();
    selected = null;
    for (const limit of limits) limit.now = limit.given;
    fillFilters();
    update();
  });

  const fillSelect = (id, names, chosen, change) => {
    $(id).replaceChildren(...names.map((name) => make("option", { value: name }, fields.get(name)?.label || name)));
    $(id).value = chosen;
    $(id).addEventListener("change", change);
  };
  const keys = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !view.front.length) return;
    event.preventDefault();
    const [x] = [$("axis-x").value], along = view.front.filter((c) => known(c, x)).sort((a, b) => value(a, x) - value(b, x));
    const at = along.indexOf(selected);
    select(along[Math.min(along.length - 1, Math.max(0, at < 0 ? 0 : at + step))]);
    $("status").textContent = `selected ${title(selected)}: ${describe(selected).join("; ")}`;
  };

  // ---------------------------------------------------------------- theme and paper

  const dark = matchMedia("(prefers-color-scheme: dark)");
  let wanted = "auto";
  const applyTheme = (forced) => {
    theme = forced || (wanted === "auto" ? (dark.matches ? "dark" : "light") : wanted);
    document.documentElement.dataset.theme = theme;
    $("theme").textContent = `Theme: ${wanted === "auto" ? `automatic (${theme})` : wanted}`;
    if (view) show();
  };
  $("theme").addEventListener("click", () => { wanted = { auto: "dark", dark: "light", light: "auto" }[wanted]; applyTheme(); });
  dark.addEventListener("change", () => applyTheme());
  const paper = matchMedia("print");
  const printing = (on) => {
    applyTheme(on ? "light" : undefined);
    for (const chart of Object.values(charts)) chart.resize();
  };
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
  paper.addEventListener("change", (event) => printing(event.matches));

  // ---------------------------------------------------------------- start

  $("heading").textContent = data.heading;
  $("subject").textContent = data.subject;
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  Chart.defaults.font.size = 13;
  const names = data.fields.filter((f) => configs.some((c) => known(c, f.name))).map((f) => f.name);
  fillSelect("axis-x", names, data.axes[0], () => drawScatter());
  fillSelect("axis-y", names, data.axes[1], () => drawScatter());
  fillSelect("bars-phase", [...new Set(data.exact.flatMap((e) => e.breakdown.map((r) => r.phase)))], data.phase, () => drawBars());
  for (const id of ["bars-by", "bars-as"]) $(id).addEventListener("change", () => drawBars());
  fillSelect("batch-of", names.filter((name) => name.startsWith("energy")), data.batch_of, () => drawBatches());
  $("scatter").addEventListener("keydown", keys);
  fillFilters();
  applyTheme();
  update();
  fillFacts();
  window.energylens = { get view() { return view; }, get selected() { return selected; }, value };
})();
