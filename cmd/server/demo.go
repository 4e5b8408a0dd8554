package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"converger/internal/channel"
)

const demoFile = "demo.json"

// demoFlags find the demo's file, so that a newcomer needs no ids and secrets.
type demoFlags struct {
	Dir string `help:"Folder of the development hub, whose demo.json fills in what is not given." default:".dev" type:"path"`
}

// demo is DIR/demo.json: what `server dev` made, for people, scripts and the simulators.
type demo struct {
	BaseURL         string                 `json:"base_url"`
	DatabaseURL     string                 `json:"database_url"`
	ManagementToken string                 `json:"management_token"`
	Tenant          demoTenant             `json:"tenant"`
	Channels        map[string]demoChannel `json:"channels"`
	Admin           demoUser               `json:"admin"`
	User            demoUser               `json:"user"` // of the tenant
	Nodes           []demoNode             `json:"nodes"`
}

type demoUser struct {
	Email    string `json:"email"`
	Password string `json:"password"`
}

type demoNode struct {
	BaseURL string `json:"base_url"`
	PID     int    `json:"pid"`
}

type demoTenant struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	APIKey string `json:"api_key"`
}

type demoChannel struct {
	ID          string `json:"id"`
	Secret      string `json:"secret"`
	URL         string `json:"url,omitempty"`
	AppSecret   string `json:"app_secret,omitempty"`
	VerifyToken string `json:"verify_token,omitempty"`
	PhoneID     string `json:"phone_number_id,omitempty"`
}

func newDemoChannel(ch channel.Channel) (demoChannel, error) {
	var config struct {
		URL         string `json:"url"`
		AppSecret   string `json:"app_secret"`
		VerifyToken string `json:"verify_token"`
		PhoneID     string `json:"phone_number_id"`
	}
	if err := json.Unmarshal(ch.Config, &config); err != nil {
		return demoChannel{}, fmt.Errorf("config of channel %s: %w", ch.Name, err)
	}
	return demoChannel{ID: ch.ID.String(), Secret: ch.Secret.Reveal(), URL: config.URL,
		AppSecret: config.AppSecret, VerifyToken: config.VerifyToken, PhoneID: config.PhoneID}, nil
}

// read returns the zero demo when there is no file.
func (f demoFlags) read() (demo, error) {
	b, err := os.ReadFile(filepath.Join(f.Dir, demoFile))
	if errors.Is(err, os.ErrNotExist) {
		return demo{}, nil
	}
	if err != nil {
		return demo{}, err
	}
	var d demo
	if err := json.Unmarshal(b, &d); err != nil {
		return demo{}, fmt.Errorf("%s: %w", filepath.Join(f.Dir, demoFile), err)
	}
	return d, nil
}

// write replaces the file in a folder.
func (d demo) write(dir string) error { return writeJSON(filepath.Join(dir, demoFile), d) }
