// Event listeners, and the first drawing.
function choices(select, names, onchange) {
  names.forEach((name, i) => select.append(new Option(name, i)));
  select.addEventListener("change", () => onchange(Number(select.value)));
}

function listen() {
  choices(control("method"), methods.map((entry) => entry.name), (number) => {
    state.method = number;
    showScene(false);
  });
  control("method").closest("label").hidden = methods.length < 2;
  choices(control("scene"), data.scenes.map((entry) => entry.name), (number) => {
    state.scene = number;
    showScene(false);
  });
  choices(control("class-filter"), data.classes, (number) => {
    state.label = number;
    filter();
  });
  for (const name of ["score-filter", "value-filter"]) control(name).addEventListener("input", filter);
  control("previous").addEventListener("click", () => step(-1));
  control("next").addEventListener("click", () => step(1));
  control("zoom-in").addEventListener("click", () => lookFrom(1.4));
  control("zoom-out").addEventListener("click", () => lookFrom(1 / 1.4));
  control("zoom-all").addEventListener("click", showAll);
  for (const name of ["points", "truth", "region", "numbers"]) {
    const box = control(`show-${name}`);
    box.addEventListener("change", () => {
      stage.classList.toggle(`no-${name}`, !box.checked);
      if (name === "points") drawPoints(scene());
    });
  }
  control("show-points").closest("label").hidden = data.image;
  document.addEventListener("keydown", press);
  listenToPointer();
}

function press(event) {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const acts = {
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
    j: () => stepBox(1),
    k: () => stepBox(-1),
    Escape: showAll,
    "+": () => lookFrom(1.4),
    "-": () => lookFrom(1 / 1.4),
  };
  const box = event.target.closest(".box");
  if (box) acts.Enter = () => flyTo(Number(box.dataset.box));
  if (event.target.closest("#viewer")) Object.assign(acts, { ArrowDown: acts.j, ArrowUp: acts.k });
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
}

function listenToPointer() {
  let drag = null;
  let way = 0; // pixels since the button went down: a drag is not a click
  const inside = (event) => {
    const area = stage.getBoundingClientRect();
    return [event.clientX - area.left, event.clientY - area.top];
  };
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 500), ...inside(event));
    redraw();
  }, { passive: false });
  stage.addEventListener("pointerdown", (event) => {
    drag = inside(event);
    way = 0;
  });
  stage.addEventListener("click", (event) => way > 4 && event.stopPropagation(), { capture: true });
  window.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const now = inside(event);
    view.x -= (now[0] - drag[0]) / view.scale;
    view.y -= (up * (now[1] - drag[1])) / view.scale;
    way += Math.hypot(now[0] - drag[0], now[1] - drag[1]);
    drag = now;
    redraw();
  });
  window.addEventListener("pointerup", () => {
    drag = null;
  });
}

// In print, use light colours and open all collapsed parts.
function listenToPrinter() {
  const closed = [...document.querySelectorAll("details:not([open])")];
  for (const [name, on] of [["beforeprint", true], ["afterprint", false]]) {
    window.addEventListener(name, () => {
      document.documentElement.toggleAttribute("data-print", on);
      closed.forEach((part) => part.toggleAttribute("open", on));
      if (found) redraw();
    });
  }
}

function start() {
  listenToPrinter();
  if (!stage) return;
  listen();
  const measure = () => {
    view.width = stage.clientWidth;
    view.height = stage.clientHeight;
  };
  measure();
  showScene(true);
  readLink();
  window.addEventListener("hashchange", readLink);
  new ResizeObserver(() => {
    measure();
    redraw();
  }).observe(stage);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

start();
