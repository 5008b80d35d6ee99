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
  control("error").addEventListener("change", (event) => {
    state.error = event.target.value;
    setThreshold(method().threshold, null);
  });
  control("slider").addEventListener("input", (event) => {
    const wanted = quantile(method().sorted, Number(event.target.value) / 1000);
    setThreshold(Number(wanted.toPrecision(6)), "slider"); // the field shows exactly the value used
  });
  control("threshold").addEventListener("input", (event) => {
    const value = event.target.valueAsNumber;
    if (Number.isFinite(value)) setThreshold(value, "field");
  });
  control("mean").addEventListener("click", () => setThreshold(method().mean, null));
}

function listenToStage() {
  choices(control("scene"), data.scenes.map((entry) => entry.name), (number) => {
    state.scene = number;
    showScene(false);
  });
  control("previous").addEventListener("click", () => step(-1));
  control("next").addEventListener("click", () => step(1));
  control("zoom-in").addEventListener("click", () => lookFrom(1.4));
  control("zoom-out").addEventListener("click", () => lookFrom(1 / 1.4));
  control("zoom-all").addEventListener("click", () => {
    fitScene();
    redraw();
  });
  for (const name of ["points", "truth", "sigma", "numbers"]) {
    const box = control(`show-${name}`);
    box.addEventListener("change", () => {
      stage.classList.toggle(`no-${name}`, !box.checked);
      if (name === "points") drawPoints(scene());
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { ArrowLeft: () => step(-1), ArrowRight: () => step(1), "+": () => lookFrom(1.4), "-": () => lookFrom(1 / 1.4) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  listenToPointer();
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
      if (data.scenes.length) redraw();
    });
  }
}

function start() {
  if (!methods.length) return;
  listenToPrinter();
  listen();
  if (!data.scenes.length) {
    showScene(false);
    return;
  }
  listenToStage();
  const measure = () => {
    view.width = stage.clientWidth;
    view.height = stage.clientHeight;
  };
  measure();
  showScene(true);
  new ResizeObserver(() => {
    measure();
    redraw();
  }).observe(stage);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

start();
